"""A Dask cluster of one thread: the product's tasks run one after the other, each when the coordinator looks around.

Everything that happens is decided by who holds the cluster: which task is next, and at which change of a file which
process dies. A run is therefore repeated exactly, which real processes do not allow. Engines are echo engines without
a process; the queue before them, tasks, plugin, coordinator and storage are the product's.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from distributed import KilledWorker, Status
from echo_engine import EchoEngine

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Result
from lorabatch.engine.server.frames import AbortRows, AddRows, ExportRows, RegisterAdapter, RowTokens
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.coordinator.control import JobControl
from lorabatch.pipeline.coordinator.losses import LossesPlugin
from lorabatch.pipeline.messages import EngineSettings, WorkerReport
from lorabatch.pipeline.monitoring.topics import REPORTS
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.queue import EngineQueue
from lorabatch.pipeline.supervisor.supervisor import EngineHandle
from lorabatch.pipeline.worker.plugin import RunPlugin

T = TypeVar("T")
BATCH_ROWS = 2


class Death(BaseException):
    """A process dies: nothing of it runs on, and nothing that it would still write is written."""


class Disk:
    """Changes of files below a folder, counted; at one of them the process that makes it dies.

    `deadly`: changes until then of files whose path has `where` in it; None for none. `torn`: share of the last write
    before it that is on the disk.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.deadly: int | None = None
        self.where = ""
        self.torn = 1.0
        #: The file of which a write was not whole; "" for none.
        self.torn_file = ""
        self.is_dead = False
        self._written: tuple[str, int] | None = None

    def revive(self) -> None:
        """Another process goes on."""
        self.is_dead, self.deadly, self._written = False, None, None

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event of Python."""
        path, *others = [os.fspath(word) for word in arguments[:2] if isinstance(word, str | os.PathLike)] or [""]
        if not path.startswith(self._root):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        self.changes(path, *(others if event != "open" else ()), is_write=event == "open")

    def changes(self, path: str, *others: str, is_write: bool = False) -> None:
        """A file is about to change, or to become another one. Raises `Death`."""
        if not self.is_dead and self.deadly is not None and any(self.where in name for name in (path, *others)):
            self.deadly -= 1
            if self.deadly <= 0:
                self._tear()
                self.is_dead = True
        if self.is_dead:
            raise Death if threading.current_thread() is threading.main_thread() else OSError("a dead process")
        self._written = (path, os.path.getsize(path) if os.path.exists(path) else 0) if is_write else None

    def _tear(self) -> None:
        if self._written is not None and os.path.exists(self._written[0]):
            path, before = self._written
            self._written = None
            after = os.path.getsize(path)
            self.torn_file = path if self.torn < 1.0 else ""
            disks, now = watching.copy(), before + int((after - before) * self.torn)
            watching.clear()
            os.truncate(path, min(after, now))
            watching.update(disks)


_CHANGES = frozenset(("open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate", "os.mkdir"))
#: Disks that hear of changes.
watching: set[Disk] = set()


def watched(disk: Disk | None) -> None:
    """Have this disk hear of all changes from now on, and no other; None: no disk."""
    if not _hooked:
        sys.addaudithook(_heard)
        _hooked.append(True)
    watching.clear()
    if disk is not None:
        watching.add(disk)


_hooked: list[bool] = []


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _CHANGES:
        for disk in list(watching):
            disk.heard(event, arguments)


#: Content hash by identity, of adapters that commands know by their versions.
contents: dict[str, str] = {}


class EchoQueue:
    """An echo engine behind the product's queue; it steps when it is asked. `errors`: prompt tokens of a row -> its
    error.
    """

    def __init__(self, folder: Path, run_id: str, errors: Mapping[tuple[int, ...], str]) -> None:
        self.queue = EngineQueue()
        self.queue.join(run_id)
        self.queue.process_ready()
        self._folder, self._errors = folder, errors
        self._engine = EchoEngine(folder, EngineConfig(max_batch_rows=BATCH_ROWS))
        self._exports: list[list[RowTokens]] = []
        #: Results by prompt tokens.
        self.computed: Counter[tuple[int, ...]] = Counter()

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine has generated."""
        return self._engine.telemetry().generated_tokens

    def call(self, change: Callable[[EngineQueue], None]) -> None:
        """As `EngineHandle` has the supervisor's thread do it."""
        change(self.queue)
        self.send()

    def send(self) -> None:
        """Hand over what the queue has for the engine."""
        for frame in self.queue.take_frames(BATCH_ROWS):
            match frame:
                case RegisterAdapter(adapter_id, folder, name, content):
                    self._engine.register_adapter(adapter_id, Path(folder), name, content)
                case AddRows(rows):
                    self._engine.import_rows(rows)
                case AbortRows(request_ids):
                    self._engine.abort(request_ids)
                case ExportRows(request_ids):
                    given_up = self._engine.export_rows(request_ids)
                    self._exports.append([RowTokens(row.request.request_id, row.token_ids, ()) for row in given_up])
        self.queue.check_integrity()

    def export(self) -> bool:
        """Reply to the first request for rows, if there is one."""
        if self._exports:
            self.queue.exported(self._exports.pop(0))
            self.send()
            return True
        return False

    def die(self, is_spared: bool) -> None:
        """The engine ends under its rows; another one starts."""
        self._engine = EchoEngine(self._folder, EngineConfig(max_batch_rows=BATCH_ROWS))
        self._exports.clear()
        self.queue.process_gone("a test", is_spared=is_spared)
        self.queue.process_ready()
        self.send()

    def step(self) -> None:
        """One step; its results go to their shards."""
        requests = dict(self._engine._queue)
        results = []
        for result in self._engine.step():
            request = requests[result.request_id]
            error = self._errors.get(request.prompt_token_ids)
            self.computed[request.prompt_token_ids] += 1
            results.append(result if error is None else Result.refused(request, error))
        self.queue.finished(results)
        self.send()


class SteppedShard(OpenShard):
    """A shard whose engine works when its task waits."""

    def __init__(self, engine: EchoQueue, taken: Callable[[list[ServedRow]], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._engine = engine
        self._taken = taken

    def take(self, timeout_s: float) -> list[ServedRow]:
        """See `OpenShard`."""
        while not self._fresh and self.num_unfinished and self._failure is None:
            self._engine.step()
        fresh = super().take(0)
        self._taken(fresh)
        return fresh


class EchoPlugin(RunPlugin):
    """A run on one worker of this cluster."""

    def __init__(self, run_id: str, store: JobStore, model: Path, errors: Mapping[tuple[int, ...], str]) -> None:
        super().__init__(run_id, EngineSettings(str(model), EngineConfig()), store)
        self._model, self._errors = model, errors
        #: By shard, prompt tokens of rows that are in the shard's journal.
        self.journalled: dict[int, set[tuple[int, ...]]] = {}

    def setup(self, worker: Any) -> None:
        """See `RunPlugin`."""
        self._begin(worker)
        self.echo = EchoQueue(self._model, self._run_id, self._errors)
        self.engine = _Handle(self)

    def adapters(self, adapter_ids: Iterable[str], fetches: Any) -> Generator[dict[str, RegisterAdapter | str]]:
        """See `RunPlugin`."""
        for adapter_id in adapter_ids:
            content = contents.get(adapter_id, "")
            if content:
                content, _ = self.store.learn_adapter(adapter_id, content)
            yield {adapter_id: RegisterAdapter(adapter_id, str(self._model), adapter_id[:4], content)}

    def release(self, adapters: Any) -> None:
        """See `RunPlugin`."""


class _Handle(EngineHandle):
    def __init__(self, plugin: EchoPlugin) -> None:
        super().__init__(plugin._run_id, plugin._model, plugin.echo.call)
        self._plugin = plugin
        # By shard, request id -> prompt tokens of rows that it was given.
        self._prompts: dict[int | None, dict[str, tuple[int, ...]]] = {}

    def open(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        adapters: Iterable[RegisterAdapter],
        rows_behind: int = 0,
        rows_left: int | None = None,
        num_announced: int = 0,
    ) -> OpenShard:
        rows = tuple(rows)
        prompts = self._prompts.setdefault(shard_id, {})
        prompts |= {row.request.request_id: row.request.prompt_token_ids for row in rows}
        before: list[ServedRow] = []

        def taken(fresh: list[ServedRow]) -> None:
            # What was taken before has been written when more is asked for.
            if shard_id is not None:
                done = {prompts[row.result.request_id] for row in before if row.result.error is None}
                self._plugin.journalled.setdefault(shard_id, set()).update(done)
            before[:] = fresh

        shard = SteppedShard(self._plugin.echo, taken, shard_id, rows, self.run_id, rows_left, num_announced)
        self.submit(EngineQueue.open, shard, tuple(adapters), rows_behind)
        return shard

    def extend(self, shard: OpenShard, rows: Iterable[ExportedRow], adapters: Iterable[RegisterAdapter] = ()) -> None:
        rows = tuple(rows)
        self._prompts[shard.shard_id] |= {row.request.request_id: row.request.prompt_token_ids for row in rows}
        super().extend(shard, rows, adapters)


class Task:
    """A task and its future."""

    def __init__(self, key: Any, call: bytes, workers: list[str] | None) -> None:
        self.key, self.status = key, "pending"
        self.call, self.workers = call, workers
        self._value: Any = None
        self._callbacks: list[Callable[[Task], None]] = []

    def end(self, status: str, value: Any = None) -> None:
        if self.status == "pending":
            self.status, self._value = status, value
            for callback in self._callbacks:
                callback(self)

    def done(self) -> bool:
        return self.status != "pending"

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), f"{self.key} is {self.status}"
        if self.status == "error":
            raise self._value
        return self._value

    def exception(self, timeout: float | None = None) -> Any:
        return self._value if self.status == "error" else None

    def cancel(self) -> None:
        self.end("cancelled")

    def add_done_callback(self, callback: Callable[[Task], None]) -> None:
        self._callbacks.append(callback)
        if self.done():
            callback(self)


class TurningControl(JobControl):
    """Has one task of the cluster run whenever the coordinator looks whether it must stop."""

    def check(self) -> None:
        """See `JobControl`."""
        self._client.turn()
        super().check()


class SmallCluster:
    """Client, scheduler and workers. `choose(count)`: which of so many tasks is next. `is_only_worker_lost`: a death
    costs the process that dies, and else all of the cluster and the command.
    """

    status = "running"
    id = "client"
    dashboard_link = ""

    def __init__(
        self, num_workers: int, disk: Disk, choose: Callable[[int], int], is_only_worker_lost: Callable[[], bool]
    ) -> None:
        self.disk, self._choose, self._is_only_worker_lost = disk, choose, is_only_worker_lost
        self._topics: dict[str, list[tuple[float, Any]]] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._num_joined = 0
        self._plugins: list[EchoPlugin] = []
        #: Names of the plugins that workers have, and get as they join.
        self.worker_plugins: set[str] = set()
        self._losses = LossesPlugin()
        self.tasks: dict[str, Any] = {}
        self.pending: list[Task] = []
        self.workers: dict[str, Any] = {}
        self.current: Any = None
        self.num_lost = 0
        self.make_plugin: Callable[[], EchoPlugin] | None = None
        self.handlers: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {}
        self.allowed_failures = 3
        _at_once(self._losses.start(self))  # type: ignore[arg-type]
        self.scheduler = SimpleNamespace(address="tcp://scheduler", identity=self._identity, **self.handlers)
        for _ in range(num_workers):
            self._join()

    # Workers

    def _join(self) -> None:
        self._num_joined += 1
        address = f"tcp://worker-{self._num_joined}"
        self.workers[address] = SimpleNamespace(
            address=address,
            status=Status.running,
            processing=(),
            plugins={},
            handlers={},
            state=SimpleNamespace(tasks={"coordinator": SimpleNamespace(state="executing")}),
            scheduler=self.scheduler,
            security=SimpleNamespace(tls_ca_file=None),
            get_current_task=lambda: "coordinator",
            loop=SimpleNamespace(add_callback=lambda call, *arguments: call(*arguments)),
            log_event=self.log_event,
        )
        self._set_up(self.workers[address])

    def _set_up(self, worker: Any) -> None:
        if self.make_plugin is not None:
            plugin = self.make_plugin()
            plugin.setup(worker)
            worker.plugins[plugin.name] = plugin
            self._plugins.append(plugin)
            self.worker_plugins.add(plugin.name)

    def start(self, make_plugin: Callable[[], EchoPlugin]) -> None:
        """Set a run up on all workers, and on those that come."""
        self.make_plugin = make_plugin
        for worker in self.workers.values():
            self._set_up(worker)

    @property
    def computed(self) -> Counter[tuple[int, ...]]:
        """What all engines have computed, those of lost workers included."""
        return sum((plugin.echo.computed for plugin in self._plugins), Counter[tuple[int, ...]]())

    @property
    def journalled(self) -> dict[int, set[tuple[int, ...]]]:
        """What all workers have journalled, by shard."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for plugin in self._plugins:
            for shard_id, rows in plugin.journalled.items():
                found.setdefault(shard_id, set()).update(rows)
        return found

    def _lose(self, worker: Any, task: Task) -> None:
        self.disk.revive()
        self.num_lost += 1
        del self.workers[worker.address]
        if isinstance(task.key, str):
            gone = {"action": "remove-worker", "expected": False, "worker": worker.address}
            self._losses.log_event("all", gone | {"processing-tasks": {task.key: None}})
            task.end("error", KilledWorker(task.key, worker, 0))
        else:
            self.pending.append(task)  # it waits for its worker until it is cancelled
        self._join()

    # Tasks

    def turn(self) -> None:
        """Run a task, or have the workers report when there is none."""
        ready = [t for t in self.pending if t.workers is None or not self.workers.keys().isdisjoint(t.workers)]
        if not ready:
            self._report()
            return
        task = ready[self._choose(len(ready))]
        self.pending.remove(task)
        allowed = [a for a in self.workers if task.workers is None or a in task.workers]
        worker = self.workers[allowed[self._choose(len(allowed))]]
        before, self.current = self.current, worker
        try:
            call = pickle.loads(task.call)
            task.end("finished", pickle.loads(pickle.dumps(call())))
        except Exception as error:
            task.end("error", pickle.loads(pickle.dumps(error)))
        except Death:
            if not self._is_only_worker_lost():
                raise
            self._lose(worker, task)
        finally:
            self.current = before

    def _report(self) -> None:
        for worker in self.workers.values():
            for plugin in worker.plugins.values():
                report = WorkerReport(worker.address, "ready", BATCH_ROWS)
                self.log_event(REPORTS.name(plugin._run_id), REPORTS.codec.encode(report))

    def submit(self, function: Callable[..., Any], *args: Any, key: Any, workers: Any = None, **_: Any) -> Task:
        task = Task(key, pickle.dumps(partial(function, *args)), workers)
        self.pending.append(task)
        self._report()  # so that a loop that waits for messages looks around at once
        return task

    def map(self, function: Callable[..., Any], items: Iterable[Any], key: Iterable[Any], **where: Any) -> list[Task]:
        is_free = where.get("allow_other_workers", False)
        workers = None if is_free else where.get("workers")
        return [self.submit(function, item, key=key, workers=workers) for item, key in zip(items, key, strict=True)]

    def cancel(self, futures: Iterable[Task]) -> None:
        for future in futures:
            future.cancel()
            self.pending = [task for task in self.pending if task is not future]

    # Scheduler

    async def _identity(self, n_workers: int = -1) -> dict[str, Any]:
        return {"workers": {address: {"last_seen": 0.0} for address in self.workers}}

    def sync(self, call: Callable[..., Coroutine[Any, Any, Any]], callback_timeout: Any = None, **request: Any) -> Any:
        return _at_once(call(**request))

    def run_on_scheduler(self, function: Callable[..., T], **arguments: Any) -> T:
        return function(dask_scheduler=self, **arguments)

    def register_plugin(self, plugin: Any) -> None:
        """Workers have their plugins, with engines, from `start` on."""

    def unregister_worker_plugin(self, name: str) -> None:
        self.make_plugin = None
        self.worker_plugins.discard(name)
        for worker in self.workers.values():
            worker.plugins.pop(name, None)

    def log_event(self, topic: str, message: Any) -> None:
        self._topics.setdefault(topic, []).append((0.0, message))
        if topic in self._handlers:
            self._handlers[topic]((0.0, message))

    def get_events(self, topic: str) -> list[tuple[float, Any]]:
        return self._topics.get(topic, [])

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        if callable(handler):
            self._handlers[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        self._handlers.pop(topic, None)


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")
