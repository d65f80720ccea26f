"""Shards of real tasks on workers that lend rows, leave, die and lose messages: each row ends in one right answer.

Tasks, plugins, queues, loans and storage are the product's. Engines take a step when they are asked, time passes when
it is asked, and a task goes on when it is asked, so that a story comes out the same each time.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Status
from echo_engine import answer
from examples import explore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_cluster import Death, EchoPlugin

from lorabatch.engine.request import ExportedRow
from lorabatch.engine.server.frames import RegisterAdapter
from lorabatch.jobs.record import JobRecord
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset.answers import BegunRow, decode_journal
from lorabatch.pipeline.dataset.reader import read_shard
from lorabatch.pipeline.messages import ShardAbandonedError, ShardOutcome
from lorabatch.pipeline.migration import incoming, outgoing
from lorabatch.pipeline.migration.peers import LendRows, Peers
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow
from lorabatch.pipeline.supervisor.queue import EngineQueue
from lorabatch.pipeline.supervisor.rows import CRASHES_TO_SUSPECT
from lorabatch.pipeline.supervisor.supervisor import EngineHandle
from lorabatch.pipeline.worker import run_shard as tasks
from lorabatch.pipeline.worker.peer_service import PeerService
from lorabatch.scheduler.messages import RunShard

T = TypeVar("T")
RUN, MAX_TOKENS, ROWS_PER_SHARD, NUM_SHARDS = "job-x-run1", 6, 6, 2
FAULTS = ("request lost", "reply lost", "repeated", "passed")


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when nothing else is to be done."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]

    def let_pass(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))


class PausingTask:
    """A task in a thread that runs only when it is told, from one look at its shard to the next. It ends with `error`,
    if with one.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run, self._is_killed = run, False
        self._may_go, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.is_over = False
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        self._may_go.acquire()
        try:
            self._run()
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._has_paused.release()

    def pause(self) -> None:
        """In the thread: wait until it may go on."""
        self._has_paused.release()
        self._may_go.acquire()
        if self._is_killed:
            raise Death

    def go_on(self) -> None:
        """Run to the next pause, or to the end."""
        if not self.is_over:
            self._may_go.release()
            assert self._has_paused.acquire(timeout=60), "the task waits for something else"

    def kill(self) -> None:
        """Its process dies."""
        self._is_killed = True
        self.go_on()
        assert self.is_over


class PausingShard(OpenShard):
    """A shard whose task pauses when it looks for results."""

    def __init__(self, pause: Callable[[], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pause = pause

    def take(self, timeout_s: float) -> list[ServedRow]:
        """See `OpenShard`."""
        self._pause()
        return super().take(0)


class MovingHandle(EngineHandle):
    """The engine of one worker; `pause`: of the task that runs there now."""

    def __init__(self, plugin: MovingPlugin, pause: Callable[[], None]) -> None:
        super().__init__(RUN, plugin._model, plugin.echo.call)
        self._pause = pause

    def open(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        adapters: Iterable[RegisterAdapter],
        rows_behind: int = 0,
        rows_left: int | None = None,
        num_announced: int = 0,
    ) -> OpenShard:
        """See `EngineHandle`."""
        pause = (lambda: None) if shard_id is None else self._pause
        shard = PausingShard(pause, shard_id, rows, self.run_id, rows_left, num_announced)
        self.submit(EngineQueue.open, shard, tuple(adapters), rows_behind)
        return shard


class MovingPlugin(EchoPlugin):
    """A run on a worker that lends rows and works on those of others."""

    def __init__(self, store: JobStore, model: Path, pause: Callable[[], None]) -> None:
        super().__init__(RUN, store, model, {})
        self._pause = pause
        #: Published outcomes by shard id.
        self.outcomes: dict[int, ShardOutcome] = {}

    def setup(self, worker: Any) -> None:
        """See `RunPlugin`."""
        super().setup(worker)
        self.engine = MovingHandle(self, self._pause)
        self.service = PeerService(worker, RUN, self.engine, Peers(worker, RUN), self)  # type: ignore[arg-type]

    def publish_outcome(self, outcome: ShardOutcome) -> None:
        """See `RunPlugin`."""
        self.outcomes[outcome.shard_id] = outcome

    async def get(self, adapter_ids: Iterable[str], peers: Any) -> dict[str, RegisterAdapter | str]:
        """As `AdapterCache`."""
        return {adapter_id: found for come in self.adapters(adapter_ids, ()) for adapter_id, found in come.items()}


class Wire:
    """Requests between workers, and what becomes of the next ones."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.faults: list[str] = []
        self.cut: set[frozenset[str]] = set()

    def rpc(self, asker: str, address: str) -> Any:
        """As `Worker.rpc`."""
        wire = self

        class Operations:
            def __getattr__(self, op: str) -> Any:
                async def call(body: bytes) -> Any:
                    fault = wire.faults.pop(0) if wire.faults else "passed"
                    worker = wire.workers.get(address)
                    await asyncio.sleep(0.01)
                    is_cut = frozenset((asker, address)) in wire.cut or asker not in wire.workers
                    if worker is None or is_cut or fault == "request lost":
                        raise OSError("no connection")
                    handler = worker.handlers.get(op)
                    if handler is None:
                        return "unknown operation"
                    reply = await handler(body=body)
                    if fault == "repeated":
                        reply = await handler(body=body)
                    if fault == "reply lost":
                        raise OSError("connection lost")
                    return reply

                return call

        return Operations()


class Moves(RuleBasedStateMachine):
    """Three workers and two shards."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.folder = Path(tempfile.mkdtemp(prefix="moves-"))
        shutil.copytree(product.job.store.url, self.folder / "out")
        self.store = JobStore(str(self.folder / "out"))
        self.loop = product.loop = SteppedLoop()
        self.wire = Wire()
        self.plugins: dict[str, MovingPlugin] = {}
        self.gone: list[MovingPlugin] = []
        self.tasks: dict[tuple[str, int], PausingTask] = {}
        self.joined: list[tuple[threading.Thread, list[Any]]] = []
        self.seen: dict[str, int] = {}
        self.num_attempts = Counter[int]()
        self.num_faults = self.num_joined = self.num_blamed = 0
        for _ in range(3):
            self.join()

    @initialize(num_steps=st.integers(0, 9))
    def begin(self, num_steps: int) -> None:
        """The coordinator has sent both shards."""
        for number in range(NUM_SHARDS):
            self.attempt(number, number)
            self.step(number, num_steps)

    # Workers

    def join(self) -> None:
        self.num_joined += 1
        address = f"tcp://worker-{self.num_joined}"
        worker = SimpleNamespace(address=address, status=Status.running, plugins={}, handlers={})
        worker.rpc = lambda to: self.wire.rpc(address, to)
        self.wire.workers[address] = worker
        plugin = MovingPlugin(self.store, self.product.model, lambda: self.product.running.pause())
        plugin.setup(worker)
        worker.plugins[plugin.name] = plugin
        self.plugins[address] = plugin

    def address(self, number: int) -> str:
        return sorted(self.plugins)[number % len(self.plugins)]

    def forget(self, address: str) -> None:
        del self.wire.workers[address]
        self.gone.append(self.plugins.pop(address))
        self.tasks = {at: task for at, task in self.tasks.items() if at[0] != address}
        self.join()

    # Tasks

    @rule(shard_id=st.integers(0, NUM_SHARDS - 1), number=st.integers(0, 2))
    def attempt(self, shard_id: int, number: int) -> None:
        """The coordinator sends a shard to a worker, perhaps one more, since it takes the first for lost."""
        address = self.address(number)
        if (address, shard_id) in self.tasks:
            return
        self.num_faults += any(shard == shard_id for _, shard in self.tasks)
        command = RunShard(shard_id, address, self.num_attempts[shard_id])
        self.num_attempts[shard_id] += 1

        self.tasks[address, shard_id] = PausingTask(lambda: tasks.run_shard(RUN, command))
        self.go_on(address, shard_id)

    def go_on(self, address: str, shard_id: int) -> None:
        """Have a task go on; take the outcome of one that is over."""
        task = self.tasks[address, shard_id]
        self.product.running, self.product.worker = task, self.wire.workers[address]
        task.go_on()
        if not task.is_over:
            return
        del self.tasks[address, shard_id]
        if task.error is not None:
            assert isinstance(task.error, ShardAbandonedError), repr(task.error)
            return
        outcome = self.plugins[address].outcomes.pop(shard_id)
        assert (outcome.shard_id, outcome.num_rows, outcome.num_errors) == (shard_id, ROWS_PER_SHARD, 0)
        assert self.store.is_committed(shard_id)

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, 9))
    def coordinator_goes_on(self, which: int) -> None:
        """Another coordinator sends a shard to the worker that has it open: one more task joins the first."""
        address, shard_id = sorted(self.tasks)[which % len(self.tasks)]
        command = RunShard(shard_id, address, self.num_attempts[shard_id])
        self.num_attempts[shard_id] += 1
        ended: list[Any] = []
        plugin, is_ours = self.plugins[address], threading.Event()

        def run() -> None:
            with plugin.claimed(command.shard_id) as (claim, is_first):
                assert not is_first
                is_ours.set()
                try:
                    ended.append(claim.result(60))
                except BaseException as error:
                    ended.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert is_ours.wait(60), "it has not joined"
        self.joined.append((thread, ended))

    # Engines, time, messages

    @rule(number=st.integers(0, 2), num_steps=st.integers(1, 8))
    def step(self, number: int, num_steps: int) -> None:
        plugin = self.plugins[self.address(number)]
        for _ in range(num_steps):
            plugin.echo.export()
            plugin.echo.step()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.let_pass(seconds)

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, 9))
    def task_looks(self, which: int) -> None:
        self.go_on(*sorted(self.tasks)[which % len(self.tasks)])

    @precondition(lambda self: self.tasks)
    @rule(
        which=st.integers(0, 9),
        number=st.integers(0, 1),
        num_rows=st.integers(1, 6),
        faults=st.just([]) | st.lists(st.sampled_from(FAULTS), max_size=5),
    )
    def lend(self, which: int, number: int, num_rows: int, faults: list[str]) -> None:
        """The coordinator has rows of a shard moved. `faults`: of the next messages between workers."""
        owner, shard_id = sorted(self.tasks)[which % len(self.tasks)]
        helper = sorted(self.plugins.keys() - {owner})[number]
        self.wire.faults += faults
        self.num_faults += len(faults)

        async def begin() -> None:
            self.plugins[owner].service.outgoing.begin(LendRows(shard_id, num_rows, helper))
            await asyncio.sleep(0)
            self.plugins[owner].echo.export()
            await asyncio.sleep(0.05)

        self.loop.run_until_complete(begin())

    @rule(one=st.integers(0, 2), other=st.integers(0, 2))
    def cut(self, one: int, other: int) -> None:
        self.num_faults += 1
        self.wire.cut.add(frozenset((self.address(one), self.address(other))))

    @rule()
    def mend(self) -> None:
        self.wire.cut.clear()

    # Processes end

    @rule(number=st.integers(0, 2))
    def worker_dies(self, number: int) -> None:
        self.num_faults += 1
        address = self.address(number)
        for at, task in list(self.tasks.items()):
            if at[0] == address:
                task.kill()
        self.forget(address)

    @rule(number=st.integers(0, 2))
    def worker_leaves(self, number: int) -> None:
        """As `RunPlugin.teardown`: what was generated is handed over."""
        address = self.address(number)
        plugin = self.plugins[address]
        self.loop.run_until_complete(self._leave(plugin))
        for at in [at for at in self.tasks if at[0] == address]:
            for _ in range(3):
                if at in self.tasks:
                    self.go_on(*at)
            assert at not in self.tasks, "a task of a worker that has left goes on"
        self.forget(address)

    async def _leave(self, plugin: MovingPlugin) -> None:
        await self._while_engines_reply(plugin.service.outgoing.call_back(2.0))
        left: list[bool] = []
        plugin.engine.submit(EngineQueue.hand_back, RUN, lambda: left.append(True))
        while not left:
            assert plugin.echo.export(), "nothing is given up"
        plugin.engine.submit(EngineQueue.leave, RUN)
        await self._while_engines_reply(plugin.service.incoming.depart(1.0))

    async def _while_engines_reply(self, wait: Any) -> None:
        waiting = asyncio.ensure_future(wait)
        while not waiting.done():
            for plugin in self.plugins.values():
                plugin.echo.export()
            await asyncio.sleep(0.05)

    @rule(number=st.integers(0, 2), is_spared=st.booleans())
    def engine_dies(self, number: int, is_spared: bool) -> None:
        """No row is so often in an engine that dies that it is given up."""
        self.num_faults += 1
        self.num_blamed += not is_spared
        self.plugins[self.address(number)].echo.die(is_spared or self.num_blamed > CRASHES_TO_SUSPECT)

    # What must hold

    @invariant()
    def what_is_written_is_right(self) -> None:
        files = {
            str(path): path.stat().st_size for path in self.folder.rglob("*") if path.suffix in (".wip", ".parquet")
        }
        if files == self.seen:
            return
        self.seen = files
        for shard_id, expected in self.product.expected.items():
            for journal in self.store.read_wip(shard_id).values():
                for row in decode_journal(journal):
                    text, adapter = expected[row.fingerprint]
                    assert row.adapter_sha256 == adapter
                    if isinstance(row, BegunRow):
                        assert row.token_ids == tuple(range(len(row.token_ids)))
                    else:
                        assert (row.completion, row.error) == (text, None)
            if self.store.is_committed(shard_id):
                with self.store.open_part(shard_id) as part:
                    rows = pq.read_table(part).to_pylist()
                found = Counter((row["completion"], row["adapter_sha256"]) for row in rows)
                assert found == Counter(expected.values()), f"shard {shard_id}"

    def teardown(self) -> None:
        """Where nothing fails any more, each shard ends: on the workers that have it, or on another."""
        try:
            self._finish()
        finally:
            for task in self.tasks.values():
                task.kill()
            for waiting in asyncio.all_tasks(self.loop):
                waiting.cancel()
            self.loop.let_pass(0.1)
            self.loop.close()
            shutil.rmtree(self.folder)

    def _finish(self) -> None:
        self.mend()
        self.seen.clear()
        self.wire.faults.clear()
        for shard_id in range(NUM_SHARDS):
            if not any(shard == shard_id for _, shard in self.tasks):
                self.attempt(shard_id, 0)
        for _ in range(400):
            if not self.tasks:
                break
            for number in range(3):
                self.step(number, 1)
            self.loop.let_pass(0.5)
            for at in list(self.tasks):
                self.go_on(*at)
        assert not self.tasks, f"{sorted(self.tasks)} do not end"
        self.what_is_written_is_right()
        assert [self.store.is_committed(shard_id) for shard_id in range(NUM_SHARDS)] == [True] * NUM_SHARDS
        for thread, ended in self.joined:
            thread.join(60)
            assert len(ended) == 1, "a task that has joined another waits for ever"
        computed = sum((p.echo.computed for p in [*self.plugins.values(), *self.gone]), Counter[tuple[int, ...]]())
        if not self.num_faults:
            assert set(computed.values()) == {1}, f"computed again: {computed.most_common(3)}"
            num_tokens = sum(p.echo.num_tokens for p in [*self.plugins.values(), *self.gone])
            assert num_tokens == MAX_TOKENS * len(computed), "tokens were generated twice"
        assert len(computed) == NUM_SHARDS * ROWS_PER_SHARD


class Product:
    """A planned job, and the product's functions on whichever loop and worker is in turn."""

    def __init__(self, job: Any, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.job, self.model = job, model
        self.loop: Any = None
        self.worker: Any = None
        self.running: Any = None
        self.record: JobRecord = job.record
        shards = [read_shard(job.store, job.record, shard_id) for shard_id in range(NUM_SHARDS)]
        #: By shard, fingerprint -> completion and adapter.
        self.expected = {
            rows.shard_id: {
                fingerprint: (answer(r.prompt_token_ids, r.adapter_id, MAX_TOKENS), r.adapter_id)
                for fingerprint, r in zip(rows.fingerprints, rows.requests, strict=True)
            }
            for rows in shards
        }
        assert [len(rows) for rows in self.expected.values()] == [ROWS_PER_SHARD] * NUM_SHARDS
        clock = SimpleNamespace(monotonic=lambda: self.loop.time())
        for module in (incoming, outgoing):
            patch.setattr(module, "time", clock)
        patch.setattr(tasks, "secede", lambda: None)
        patch.setattr(tasks, "get_worker", lambda: self.worker)


def test_rows_move_and_none_is_lost_or_answered_twice(
    prepare_job: Callable[..., Any], weightless_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = NUM_SHARDS * ROWS_PER_SHARD
    rows = {
        "id": range(num_rows),
        "prompt_token_ids": [[3 + i, 4] for i in range(num_rows)],
        "adapter": [("alpha", None)[i % 2] for i in range(num_rows)],
    }
    job = prepare_job(pa.table(rows), rows_per_shard=ROWS_PER_SHARD, max_tokens=MAX_TOKENS)
    job.plan()
    product = Product(job, weightless_model, monkeypatch)
    explore(lambda: Moves(product), num_short=8, num_steps=20, long_s=120)
