"""Keeps one engine process alive, with the queue in front of it. No Dask: `worker/plugin.py` puts it on a worker.

All state belongs to the supervisor's thread. Messages of the engine process and calls of the runs reach the thread
through its inbox, so that no caller waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec

from ...engine.request import ExportedRow
from ...engine.server.frames import Exported, Fatal, FromEngine, Heartbeat, Ready, RegisterAdapter, Results
from ...engine.server.process import kernel_kills
from ...engine.telemetry import EngineTelemetry
from ..messages import EngineFailedError, EngineSettings, WorkerReport
from .health import SILENCE_S, EngineHealth, RestartPolicy
from .metrics import EngineMeter
from .open_shard import OpenShard
from .process import EngineProcess
from .queue import EngineQueue, LentRows
from .spare import SpareEngine, engine_log

logger = logging.getLogger(__name__)
REPORT_INTERVAL_S = 1.0
Reporter = Callable[[WorkerReport], None]
_P = ParamSpec("_P")


class EngineSupervisor:
    """Keeps one engine process, which is restarted when it dies, for the runs that share it.

    `find_model` returns the local model folder (it may download). `folder`: folder of the engine's own files. `spare`:
    a process that was started before, used as the first process if it lives. `silence_s`: seconds of silence after
    which a ready process is replaced.

    Public methods may be called from any thread. All private methods but `_receive` run in the supervisor's thread.
    """

    def __init__(
        self,
        settings: EngineSettings,
        find_model: Callable[[], Path],
        folder: Path,
        worker: str,
        spare: SpareEngine | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._start_process = partial(EngineProcess, find_model, engine_log(folder), self._receive)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queue = EngineQueue()
        self._reporters: dict[str, Reporter] = {}
        self._policy = RestartPolicy()
        self._meter = EngineMeter(worker, settings.config.batch_rows, time.monotonic())
        # Why the present process ends, if it has said so or the supervisor ends it; else None.
        self._fatal: Fatal | None = None
        self._has_finished_rows = False
        self._is_closed = False
        self._restart_at_s: float | None = None
        self._report_at_s = 0.0
        self._health = EngineHealth(time.monotonic(), silence_s)
        self._kernel_kills = kernel_kills()
        self._process = self._start_process(settings, spare)
        self._thread = threading.Thread(target=self._run, name="engine supervisor", daemon=True)
        self._thread.start()

    def join(self, run_id: str, send_report: Reporter) -> EngineHandle:
        """Let a run use the engine from now on. `send_report` is called about once a second until the run leaves."""
        self._inbox.put(partial(self._join, run_id, send_report))
        return EngineHandle(
            run_id,
            self._folder,
            lambda change: self._inbox.put(partial(change, self._queue)),
            lambda: self._process.model_problem(),
        )

    def leave(self, run_id: str, timeout_s: float) -> None:
        """Fail the open shards of a run with `ShardAbandonedError`, once the process has given up the tokens generated
        for them; other runs go on. Waits until the shards have failed, and for the process at most `timeout_s`.
        """
        done = threading.Event()
        leave = partial(self._leave, run_id, done)
        self._inbox.put(partial(self._queue.hand_back, run_id, leave))
        if not done.wait(timeout_s):
            self._inbox.put(leave)
            done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Fail all open shards with `ShardAbandonedError` and end the process. Waits for each at most `timeout_s`."""
        self._inbox.put(self._close)
        self._thread.join(timeout_s)
        self._process.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether the engine was given up."""
        return self._meter.latest.state == "failed"

    def _receive(self, process: EngineProcess, message: FromEngine | str) -> None:
        self._inbox.put(partial(self._handle, process, message))

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception as error:
            # A defect of the supervisor must not leave tasks waiting for ever.
            logger.exception("the engine supervisor failed")
            self._process.stop()
            self._give_up(f"{type(error).__name__} in the engine supervisor: {error}")
            self._report_if_due()
            self._refuse_until_closed()

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._patience_s())()
        self._watch_health()
        self._restart_if_due()
        if not self._is_closed:
            for frame in self._queue.take_frames(self._settings.config.batch_rows):
                self._process.send(frame)
        self._report_if_due()

    def _refuse_until_closed(self) -> None:
        while not self._is_closed:
            try:
                self._inbox.get()()
            except Exception:
                logger.exception("the engine supervisor has failed before")

    def _patience_s(self) -> float:
        due_s = min(self._report_at_s, self._restart_at_s or self._report_at_s)
        return max(0.001, due_s - time.monotonic())

    def _join(self, run_id: str, send_report: Reporter) -> None:
        self._queue.join(run_id)
        self._reporters[run_id] = send_report
        self._report_at_s = 0.0

    def _leave(self, run_id: str, done: threading.Event) -> None:
        self._reporters.pop(run_id, None)
        self._queue.leave(run_id)
        done.set()

    def _close(self) -> None:
        self._is_closed = True
        self._process.stop()
        self._reporters.clear()
        for run_id in list(self._queue.table.runs):
            self._queue.leave(run_id)

    def _handle(self, process: EngineProcess, message: FromEngine | str) -> None:
        if process is not self._process:
            return
        match message:
            case Ready():
                self._ready(message)
            case Results(results):
                self._policy.row_finished()
                if not self._has_finished_rows:
                    logger.info("the engine process has finished its first row")
                self._has_finished_rows = True
                self._queue.finished(results)
            case Exported(rows):
                self._queue.exported(rows)
            case EngineTelemetry():
                self._meter.progressed(message, time.monotonic())
            case Fatal():
                self._fatal = message
            case str(reason):
                self._process_exited(self._fatal or Fatal(reason))
        step_s = message.step_s if isinstance(message, Heartbeat) else 0.0
        self._health.heard(time.monotonic(), is_ready=self._meter.latest.state == "ready", step_s=step_s)

    def _ready(self, message: Ready) -> None:
        kind = ", a spare one" if self._process.was_spare else ""
        logger.info("engine process %d ready after %.1f s%s", message.pid, message.load_s, kind)
        # Limits that were not set are the engine's choice for its device.
        self._settings = self._settings.with_limits(message.batch_rows, message.step_tokens)
        self._has_finished_rows = False
        self._meter.set(batch_rows=message.batch_rows)
        self._policy.started()
        self._queue.process_ready()
        self._meter.process_started(message.pid, time.monotonic())
        self._report_at_s = 0.0

    def _process_exited(self, fatal: Fatal) -> None:
        table = self._queue.table
        logger.warning("engine process ended: %s (%d rows in it)", fatal.error, table.num_in_process)
        self._fatal = None
        is_spared = self._shrink(fatal)
        self._meter.process_died(fatal.error)
        is_of_search = table.is_searching and not is_spared
        num_blamed = self._queue.process_gone(fatal.error, is_spared=is_spared)
        hopeless = self._policy.died(fatal.error, fatal.is_permanent, is_of_search=is_of_search, num_blamed=num_blamed)
        if hopeless is not None:
            self._give_up(hopeless)
        else:
            self._restart_at_s = time.monotonic() + self._policy.delay_s
        self._report_at_s = 0.0

    def _shrink(self, fatal: Fatal) -> bool:
        """Halve the batch of the next process if this one died for lack of memory. Returns whether it is halved: then
        no row is to blame for the death.
        """
        kills_before, self._kernel_kills = self._kernel_kills, kernel_kills()
        by_kernel = self._kernel_kills > kills_before and "signal 9" in fatal.error
        smaller = self._settings.halved() if by_kernel or fatal.is_out_of_memory else None
        if smaller is None:
            return False
        logger.warning("out of memory: the next engine process runs %d rows at once", smaller.config.batch_rows)
        self._settings = smaller
        self._meter.set(batch_rows=smaller.config.batch_rows)
        return True

    def _give_up(self, reason: str) -> None:
        self._meter.set(state="failed", error=reason)
        self._queue.fail(EngineFailedError(f"The engine on {self._meter.latest.worker}: {reason}"))
        self._report_at_s = 0.0

    def _watch_health(self) -> None:
        of_model = self._process.model_problem()
        problem = of_model or self._health.problem(time.monotonic())
        if problem is not None and self._restart_at_s is None:
            logger.error("engine process: %s; it is replaced", problem)
            self._fatal = Fatal(problem, is_permanent=bool(of_model))
            self._health.start(time.monotonic())
            self._process.stop()

    def _restart_if_due(self) -> None:
        if self._restart_at_s is not None and time.monotonic() >= self._restart_at_s and not self._is_closed:
            self._restart_at_s = None
            self._health.start(time.monotonic())
            self._process = self._start_process(self._settings)

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self._report_at_s and not self._queue.has_news:
            return
        self._queue.has_news = False
        self._report_at_s = now_s + REPORT_INTERVAL_S
        in_process = self._queue.table.in_process_by_run()
        for run_id, send_report in self._reporters.items():
            run = self._queue.table.runs[run_id]
            # A run that is alone has the whole engine, also between two rows.
            share = in_process[run_id] / max(1, in_process.total()) if len(self._reporters) > 1 else 1.0
            lent = self._queue.lent_by_shard(run_id)
            send_report(self._meter.report(run.shards, run.take_finished(), lent, share))


class EngineHandle:
    """One run's access to an engine, from any thread. `EngineSupervisor.join` makes it.

    `folder`: folder for files that rows refer to, removed with the engine. `submit`: has the supervisor's thread call a
    function of the queue. `model_problem`: returns the `EngineProcess.model_problem` of the engine's present process.
    """

    def __init__(
        self,
        run_id: str,
        folder: Path,
        submit: Callable[[Callable[[EngineQueue], None]], None],
        model_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self._submit = submit
        self._model_problem = model_problem

    def check_model(self) -> None:
        """Raise `EngineFailedError` when the base model's files were written to since the engine has loaded them: later
        answers may be those of other weights.
        """
        problem = self._model_problem()
        if problem is not None:
            raise EngineFailedError(problem)

    @property
    def log_path(self) -> Path:
        """Path of the file with the engine process's output."""
        return engine_log(self.folder)

    def open(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        adapters: Iterable[RegisterAdapter],
        rows_behind: int = 0,
        rows_left: int | None = None,
        num_announced: int = 0,
    ) -> OpenShard:
        """Give rows to the engine, begun or not, with unique request ids; results arrive at the returned shard.
        `shard_id`: None for incoming rows of another worker's shard. `adapters`, `rows_behind`: as `EngineQueue.open`
        takes them. `rows_left`, `num_announced`: as `OpenShard` takes them.
        """
        shard = OpenShard(shard_id, rows, self.run_id, rows_left, num_announced)
        self.submit(EngineQueue.open, shard, tuple(adapters), rows_behind)
        return shard

    def extend(self, shard: OpenShard, rows: Iterable[ExportedRow], adapters: Iterable[RegisterAdapter] = ()) -> None:
        """Give the engine announced rows of an open shard. `adapters`: as `EngineQueue.extend` takes them."""
        self.submit(EngineQueue.extend, shard, tuple(rows), tuple(adapters))

    def lend(
        self, shard_id: int, num_rows: int, is_selective: bool = False, adapter_id: str | None = None
    ) -> Future[LentRows | None]:
        """Take rows of an open shard out of the engine (`EngineQueue.lend`)."""
        lent: Future[LentRows | None] = Future()
        self.submit(EngineQueue.lend, self.run_id, shard_id, num_rows, lent, is_selective, adapter_id)
        return lent

    def submit(self, change: Callable[Concatenate[EngineQueue, _P], None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Have the supervisor call a method of its queue, as in `submit(EngineQueue.abandon, shard)`. Never waits."""
        self._submit(lambda queue: change(queue, *args, **kwargs))
