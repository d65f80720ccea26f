"""`RunPlugin`: the worker plugin by which a run uses a worker's engine, and `WorkerEngines`, which runs share.

Dask sets the plugin up on every worker, including workers that join or restart later. `setup` starts the engine
process, or joins that of another run with equal settings, and returns at once: loading weights takes longer than a
worker may be silent. Reports say when the engine is ready. Engines of a run that may need none, such as an update,
start later (`registration.start_engines`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed import Status, Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.pickle import dumps

from ...engine.config import read_model_config
from ...engine.peft.audit import AdapterAudit
from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ...jobs.opening.confined_audit import Auditors
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from ...jobs.status.worker_names import file_tag
from ...jobs.storage.limits import waits_said
from ...jobs.storage.local_copy import local_folder
from ...jobs.storage.location import options_for
from ...jobs.storage.stores import open_store
from ...jobs.store import JobStore
from ...scheduler.messages import AdapterFetch
from ...system.confinement import ConfinedError
from ...system.local_cache import temporary_folder
from ...version import __version__
from ..cluster.clock import follow_clock, parts_of_server
from ..cluster.versions import sent_to_workers
from ..cluster.worker_process import keep_warnings, leave_on_sigterm, let_pools_wait, revive_pools, worker_log_path
from ..dataset.earlier import EarlierAnswers
from ..dataset.index import spelling
from ..dataset.reader import ShardReader
from ..dataset.writer import Spell
from ..messages import (
    EngineFailedError,
    EngineIdentity,
    EngineSettings,
    ShardAbandonedError,
    ShardOutcome,
    StorageWait,
    WorkerReport,
)
from ..migration.peers import Peers, stop_serving_peers
from ..monitoring.logs import LogShipper
from ..monitoring.topics import OUTCOMES, REPORTS, WAITS
from ..supervisor.spare import SpareEngine, engine_folder
from ..supervisor.supervisor import EngineHandle, EngineSupervisor, Reporter
from .adapters import AdapterCache
from .peer_service import PeerService
from .spare import SPARE_EXTENSION

logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 4.0
# Seconds that lent rows may take to come back: a helper's step, and the time between two requests. Rows that are later
# go on from where they were lent.
_RECALL_TIMEOUT_S = 2.0
# Seconds in which owners may fetch incoming rows; they ask for them several times a second.
_RETURN_TIMEOUT_S = 1.0
# Seconds after which a shard that waits for adapters looks at what its engine has done.
_PATIENCE_S = 0.1
# Seconds between two requests of a worker without work whether its run goes on.
RUN_CHECK_S = 20.0


def plugin_name(run_id: str) -> str:
    """The plugin's name on every worker."""
    return f"lorabatch-{__version__}-{run_id}"


class RunPlugin(WorkerPlugin):
    """One run of a job on one worker. `starts_later`: whether `setup` leaves the engine to `start_engine`."""

    # A client that reconnects registers the plugin again, which must not tear the running engine down.
    idempotent = True

    def __init__(self, run_id: str, settings: EngineSettings, store: JobStore, *, starts_later: bool = False) -> None:
        self.name = plugin_name(run_id)
        self._run_id = run_id
        self._settings = settings
        self.store = store
        self.starts_later = starts_later

    def __reduce__(self) -> tuple[Any, ...]:
        return sent_to_workers(type(self), self.__dict__)

    def setup(self, worker: Worker) -> None:
        """Prepare the worker for the run's tasks, and start the engine unless it starts later. Dask calls this on the
        worker.
        """
        self._begin(worker)
        let_pools_wait(worker)
        keep_warnings(worker)
        log = f"worker-{file_tag(worker.address)}"
        self._shipper = LogShipper(self.store, {log: worker_log_path(worker)}, shared=[log])
        loop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        self._watch = loop.create_task(self._leave_after_the_run())
        self._clock = loop.create_task(follow_clock(partial(parts_of_server, worker)))
        self._waits = contextlib.ExitStack()
        self._waits.enter_context(waits_said(self._say_wait, partial(self._say_wait, "")))
        leave_on_sigterm(worker)
        if not self.starts_later:
            self.start_engine()

    def start_engine(self) -> None:
        """Join the engine, which is started unless it runs. To be called once, in the event loop's thread."""
        worker, self._engines = self._worker, engines_of(self._worker)
        settings = self._settings.with_threads(worker.state.nthreads)
        self.engine: EngineHandle = self._engines.join(self._run_id, settings, self._find_model, self._send)
        self._shipper.add(f"engine-{file_tag(worker.address)}", self.engine.log_path)
        peers = Peers(worker, self._run_id)
        folder = self.engine.folder / "adapters"
        self._adapters = AdapterCache(
            peers,
            lambda: self.record().adapters,
            self.store,
            self._audit,
            self._settings.storage_options,
            folder,
            lambda: self.record().spec.adapter_disk_bytes,
        )
        self._peer_service = PeerService(worker, self._run_id, self.engine, peers, self._adapters)
        threading.Thread(target=self._warm, name="warm adapters", daemon=True).start()
        self.starts_later = False

    def _warm(self) -> None:
        """Load the store's library and start the process that audits, while rows are indexed and the engine loads."""
        with contextlib.suppress(Exception):  # who needs them says what is wrong
            # not `record`, which is kept: the frozen job may change until the first shard
            urls = [adapter.url for adapter in self.store.read_record().adapters if adapter.files]
            if urls:
                open_store(urls[0], options_for(urls[0], self._settings.storage_options))
                with temporary_folder() as empty:
                    self._audit("", empty)

    def _begin(self, worker: Worker) -> None:
        """Set the attributes of a plugin on a worker that has no engine yet."""
        self._worker = worker
        self.address: str = worker.address
        self._record: JobRecord | None = None
        self._shards: ShardReader | None = None
        self._earlier: EarlierAnswers | None = None
        self._auditors: Auditors | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._claims: dict[int, Future[ShardOutcome]] = {}

    async def teardown(self, worker: Worker) -> None:
        """Leave the engine. Open shards are abandoned, and their tasks get the time to keep finished and begun rows.
        Outgoing rows are fetched first, incoming rows go back to their owners.
        """
        self._clock.cancel()
        if self._watch is not asyncio.current_task():
            self._watch.cancel()
        folder = None if self.starts_later else await self._leave_engine()
        await asyncio.to_thread(self._close, folder)

    async def _leave_engine(self) -> TemporaryDirectory[str] | None:
        """Leave the engine. Returns its folder if no other run uses the engine."""
        self._adapters.foresee(())
        await self._peer_service.outgoing.call_back(_RECALL_TIMEOUT_S)
        # Shards that are open fail here, with the tokens that their rows have; those that only wait for adapters below.
        folder = await asyncio.to_thread(self._engines.leave, self._run_id, _CLOSE_TIMEOUT_S)
        self._adapters.close()
        await self._peer_service.incoming.depart(_RETURN_TIMEOUT_S)
        stop_serving_peers(self._worker, self._run_id)
        return folder

    async def _leave_after_the_run(self) -> None:
        """Remove the plugin once its run is over, if the scheduler has not done so: it could not reach this worker at
        that time, or the worker was just joining. The engine would keep its memory for as long as the worker lives.
        """
        while self.name in self._worker.plugins:
            await asyncio.sleep(RUN_CHECK_S)
            # A worker that has lost the scheduler for good ends anyway.
            with contextlib.suppress(Exception):
                if not self._claims and not await self._is_registered():
                    logger.warning("run %s is over: its engine on this worker ends", self._run_id)
                    await self._worker.plugin_remove(name=self.name)

    async def _is_registered(self) -> bool:
        answer = await self._worker.scheduler.run_function(
            function=dumps(has_plugin), args=dumps(()), kwargs=dumps({"name": self.name})
        )
        # any other result says nothing about the run
        return answer.get("result") is not False

    def _close(self, folder: TemporaryDirectory[str] | None) -> None:
        with self._lock:
            claims, shards = list(self._claims.values()), self._shards
        for claim in claims:
            with contextlib.suppress(Exception):
                claim.result(_CLOSE_TIMEOUT_S)
        if shards is not None:
            shards.close()
        with self._lock:
            self._is_over = True
        if self._auditors is not None:
            self._auditors.__exit__()
        if self._worker.status not in (Status.running, Status.paused):
            # Reported last: the worker that opens the shards next must find the rows that were kept.
            self._send(WorkerReport(self.address, "left", self._settings.config.batch_rows))
        self._shipper.close(_CLOSE_TIMEOUT_S)
        self._waits.close()
        if folder is not None:
            folder.cleanup()

    @property
    def batch_rows(self) -> int:
        """Most rows of a step of the engine, by its settings."""
        return self._settings.config.batch_rows

    def check_output(self) -> None:
        """Raise `OutputConflictError` when the output is another job's by now, or this job's with other adapters, so
        that this run's answers have no place in it.
        """
        self.store.check_current(self.record())

    def record(self) -> JobRecord:
        """The record of the frozen job, read once."""
        with self._lock:
            if self._record is None:
                self._record = self.store.read_record()
            return self._record

    def shards(self) -> ShardReader:
        """The reader of the job's prepared rows, opened once."""
        record = self.record()
        with self._lock:
            if self._shards is None:
                self._shards = ShardReader(self.store, record)
            return self._shards

    def earlier(self) -> EarlierAnswers:
        """The answers of earlier jobs that the job keeps, if it is an update."""
        record = self.record()
        with self._lock:
            if self._earlier is None:
                self._earlier = EarlierAnswers([self.store.source(name) for name in record.sources])
            return self._earlier

    def spec(self) -> JobSpec:
        """The options of the job, with those of its stores."""
        opened = {"model": self._settings.model_url, "storage_options": dict(self._settings.storage_options)}
        return self.record().spec.model_copy(update=opened)

    def spelling(self) -> Spell:
        """The function that gives the bytes of tokens in the run's output."""
        return spelling(self.record(), self._settings.model_url, self._settings.storage_options)

    @contextlib.contextmanager
    def claimed(self, shard_id: int) -> Iterator[tuple[Future[ShardOutcome], bool]]:
        """The future outcome of a shard, and whether the caller must produce it: a worker works on a shard once.

        The caller that must produce the outcome sets the future's result; an exception that leaves its block is set
        instead.
        """
        with self._lock:
            is_ours = shard_id not in self._claims
            claim = self._claims.setdefault(shard_id, Future())
        try:
            yield claim, is_ours
        except BaseException as error:
            if is_ours:
                claim.set_exception(error)
            raise
        finally:
            if is_ours:
                with self._lock:
                    del self._claims[shard_id]

    def adapters(
        self, adapter_ids: Collection[str], fetches: Collection[AdapterFetch]
    ) -> Generator[dict[str, RegisterAdapter | str]]:
        """Adapters in local folders as they come, by identity; a clause in place of one that cannot be used says why.
        Nothing came in `_PATIENCE_S` seconds where a piece is empty. `fetches`: workers that have adapters; others are
        read from storage. The folders stay until `release`.

        Blocks, so it must not be called from the event loop. Raises `StorageError`, and `ShardAbandonedError` when the
        event loop ends first.
        """
        loop = self._worker.loop.asyncio_loop  # type: ignore[attr-defined]
        sources = {fetch.adapter_id: source for fetch in fetches if (source := fetch.from_replica_id) is not None}
        arriving = self._adapters.arriving(adapter_ids, sources)
        coming: Future[dict[str, RegisterAdapter | str]] | None = None
        try:
            while True:
                coming = coming or asyncio.run_coroutine_threadsafe(_next_of(arriving), loop)
                done, _ = wait([coming], timeout=_PATIENCE_S)
                if not done:
                    if not loop.is_running():
                        raise ShardAbandonedError(f"Worker {self.address} has ended; others go on with its shards.")
                    yield {}
                    continue
                try:
                    found, coming = coming.result(), None
                except CancelledError:
                    raise ShardAbandonedError(f"Worker {self.address} stops; others go on with its shards.") from None
                if not found:
                    return
                yield found
        finally:
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(self._forego(arriving, coming), loop)

    async def _forego(
        self,
        arriving: AsyncGenerator[dict[str, RegisterAdapter | str]],
        coming: Future[dict[str, RegisterAdapter | str]] | None,
    ) -> None:
        """Ask for no further adapters, and let those go that come now."""
        with contextlib.suppress(StorageError, KeyError):
            if coming is not None:
                found = await asyncio.wrap_future(coming)
                await asyncio.to_thread(self.release, found.values())
        await arriving.aclose()

    def release(self, adapters: Iterable[RegisterAdapter | str]) -> None:
        """Let adapters of `adapters` go that no open row of a shard needs any more."""
        self._adapters.release(adapters)

    def _audit(self, name: str, folder: Path) -> AdapterAudit:
        """Audit an adapter with all its values, in a child process that starts with the first one."""
        with self._lock:
            if self._is_over:
                raise ConfinedError("the run is over on this worker")
            if self._auditors is None:
                model = self._find_model()
                self._auditors = Auditors(model, read_model_config(model), self._settings.model_url)
        return self._auditors.audit(name, folder, is_patient=False, is_brief=True)

    def _find_model(self) -> Path:
        return local_folder(self._settings.model_url, self._settings.storage_options)

    def _send(self, report: WorkerReport) -> None:
        """Publish a report from the supervisor's thread, by way of the event loop, whose thread owns Dask's streams."""
        revive_pools(self._worker)
        with self._lock:
            claims = tuple(self._claims)
        adapters = getattr(self, "_adapters", None)  # the first report may come while it is made
        report = replace(report, begun_shards=claims)
        if adapters is not None:
            report = replace(report, adapter_copies_bytes=adapters.copies_bytes, fetches=adapters.use)
        # A worker that ends may have closed its loop already.
        with contextlib.suppress(RuntimeError):
            self._worker.loop.add_callback(REPORTS.publish, self._worker, self._run_id, report)

    def publish_outcome(self, outcome: ShardOutcome) -> None:
        """Publish the outcome of a shard whose task is about to end. Dask delivers it to the coordinator before the end
        of the task, and at a fraction of the cost of a task's result, which its client fetches by a request.
        """
        with contextlib.suppress(RuntimeError):
            self._worker.loop.add_callback(OUTCOMES.publish, self._worker, self._run_id, outcome)

    def _say_wait(self, text: str) -> None:
        """Publish a sentence about the storage that this worker waits for; called by a thread of its own."""
        with contextlib.suppress(RuntimeError):
            wait = StorageWait(self.address, text)
            self._worker.loop.add_callback(WAITS.publish, self._worker, self._run_id, wait)


async def _next_of(
    arriving: AsyncGenerator[dict[str, RegisterAdapter | str]],
) -> dict[str, RegisterAdapter | str]:
    return await anext(arriving, {})


def has_plugin(dask_scheduler: Any, name: str) -> bool:
    """Whether the scheduler sets a plugin of this name up on workers."""
    return name in dask_scheduler.worker_plugins


def find_plugin(worker: Worker, run_id: str) -> RunPlugin:
    """The run's plugin on this worker. Raises `EngineFailedError` when Dask has not set it up."""
    plugin: Any = worker.plugins.get(plugin_name(run_id))
    if not isinstance(plugin, RunPlugin):
        raise EngineFailedError(f"Worker {worker.address} has no engine: its plugin was not set up; see its log.")
    return plugin


_EXTENSION = "lorabatch-engines"


@dataclass(slots=True)
class _Engine:
    """An engine that runs, the folder of its files, and the ids of the runs that use it."""

    supervisor: EngineSupervisor
    folder: TemporaryDirectory[str]
    runs: set[str] = field(default_factory=set)


class WorkerEngines:
    """Starts an engine for the first run that needs it and ends it with the last. Any thread may call.

    `folder`: the worker's folder, from which Dask removes files that killed workers leave behind. `address`: address of
    the worker. `spare`: process for the first engine.
    """

    def __init__(self, folder: str, address: str, spare: SpareEngine | None = None) -> None:
        self._folder = folder
        self._address = address
        self._spare = spare
        self._lock = threading.Lock()
        self._engines: dict[EngineIdentity, _Engine] = {}
        self._engine_of: dict[str, _Engine] = {}

    def join(
        self, run: str, settings: EngineSettings, find_model: Callable[[], Path], send_report: Reporter
    ) -> EngineHandle:
        """Let a run use the engine with these settings, which is started unless it runs. An engine that was given up is
        replaced by a new one.
        """
        with self._lock:
            engine = self._engines.get(settings.identity)
            if engine is None or engine.supervisor.has_failed:
                engine = self._start(settings, find_model)
                self._engines[settings.identity] = engine
            engine.runs.add(run)
            self._engine_of[run] = engine
            return engine.supervisor.join(run, send_report)

    def _start(self, settings: EngineSettings, find_model: Callable[[], Path]) -> _Engine:
        spare, self._spare = self._spare, None
        folder = spare.folder if spare else engine_folder(self._folder)
        supervisor = EngineSupervisor(settings, find_model, Path(folder.name), self._address, spare=spare)
        return _Engine(supervisor, folder)

    def leave(self, run: str, timeout_s: float) -> TemporaryDirectory[str] | None:
        """End a run: its open shards fail with `ShardAbandonedError`, shards of other runs go on. With the last run the
        engine ends, and its folder is returned, to be removed when its log has been read; None otherwise.
        """
        with self._lock:
            engine = self._engine_of.pop(run)
            engine.runs.discard(run)
            is_last = not engine.runs
            if is_last:
                self._engines = {known: other for known, other in self._engines.items() if other is not engine}
        engine.supervisor.leave(run, timeout_s)
        if not is_last:
            return None
        engine.supervisor.close(timeout_s)
        return engine.folder


def engines_of(worker: Worker) -> WorkerEngines:
    """The engines of a worker, made on the first call."""
    found = worker.extensions.get(_EXTENSION)
    if found is None:
        spare = worker.extensions.get(SPARE_EXTENSION)
        found = worker.extensions[_EXTENSION] = WorkerEngines(worker.local_directory, worker.address, spare)
    assert isinstance(found, WorkerEngines), f"{_EXTENSION} of {worker.address} is {found!r}"
    return found
