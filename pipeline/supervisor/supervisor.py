"""Keeps one engine process alive and its rows accounted for. No Dask: `worker_engines.py` puts it on a worker.

All state belongs to one thread, which takes what it must do from a queue: what the engine process says, and what the
runs that share the engine ask (`engine_share.py`). The rows themselves are in `engine_rows.py`.

One run's share of an engine: what a host may ask of it, from any thread, whoever else uses the engine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ...engine.request import ExportedRow
from ...engine.server.process import kernel_kills
from ...engine.server.wire import unpack_exported_row, unpack_result, unpack_telemetry
from ..messages import EngineFailedError, EngineSettings, LocalAdapter, WorkerReport
from .health import EnginePulse, GiveUp, RestartPolicy
from .metrics import EngineMeter
from .open_shard import OpenShard, ServedRow
from .process import EngineChild
from .requests import EngineRows, Loan, Message

logger = logging.getLogger(__name__)
REPORT_INTERVAL_S = 1.0
Reporter = Callable[[WorkerReport], None]


class EngineKeeper:
    """One engine process, restarted when it dies, and the runs that share it.

    `find_model` returns the local model folder (it may download). `folder`: of the engine's own files.
    """

    def __init__(self, settings: EngineSettings, find_model: Callable[[], Path], folder: Path, worker: str) -> None:
        self._settings = settings
        self._folder = folder
        self._new_child = partial(EngineChild, find_model, engine_log(folder), self._overhear)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows = EngineRows()
        self._reporters: dict[str, Reporter] = {}
        self._policy = RestartPolicy()
        self._meter = EngineMeter(worker, settings.config.batch_rows)
        self._fatal: dict[str, Any] = {}
        self._is_closed = False
        self._restart_at_s: float | None = None
        self._report_at_s = 0.0
        self._pulse = EnginePulse(time.monotonic())
        self._kernel_kills = kernel_kills()
        self._child = self._new_child(settings)
        self._thread = threading.Thread(target=self._run, name="engine keeper", daemon=True)
        self._thread.start()

    # Called from other threads

    def join(self, run: str, send_report: Reporter) -> EngineShare:
        """A share for a run; `send_report` is called about once a second until it leaves."""
        self._inbox.put(partial(self._join, run, send_report))
        return EngineShare(run, self._folder, self._act_later)

    def leave(self, run: str, timeout_s: float) -> None:
        """Fail what a run has open with `ShardAbandonedError`, once the process has given up what it has generated for
        it; others go on. Waits until that is done, and for the process no longer than `timeout_s`.
        """
        done = threading.Event()
        leave = partial(self._leave, run, done)
        self._inbox.put(partial(self._hand_back, run, leave))
        if not done.wait(timeout_s):
            self._inbox.put(leave)
            done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Fail what is open with `ShardAbandonedError` and end the process; wait for both."""
        self._inbox.put(self._close)
        self._thread.join(timeout_s)
        self._child.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether the engine was given up."""
        return self._meter.latest.state == "failed"

    def _act_later(self, action: Action) -> None:
        self._inbox.put(partial(self._act, action))

    def _overhear(self, child: EngineChild, message: dict[str, Any]) -> None:
        self._inbox.put(partial(self._hear, child, message))

    # Everything below runs in the keeper's own thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        except Exception as error:
            # A defect of ours must not leave tasks waiting for ever.
            logger.exception("the engine keeper failed")
            self._child.stop()
            self._give_up(f"{type(error).__name__} in the engine keeper: {error}")
            self._report_if_due()
            self._refuse_until_closed()

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._patience_s())()
        self._watch_pulse()
        self._restart_if_due()
        if not self._is_closed:
            self._tell(self._rows.sendable(self._settings.config.batch_rows))
        self._report_if_due()

    def _refuse_until_closed(self) -> None:
        while not self._is_closed:
            try:
                self._inbox.get()()
            except Exception:
                logger.exception("the engine keeper has failed before")

    def _patience_s(self) -> float:
        due_s = min(self._report_at_s, self._restart_at_s or self._report_at_s)
        return max(0.001, due_s - time.monotonic())

    def _tell(self, messages: Sequence[Message] | None) -> None:
        for message in messages or ():
            self._child.send(message)

    def _act(self, action: Action) -> None:
        self._tell(action(self._rows))

    def _join(self, run: str, send_report: Reporter) -> None:
        self._rows.join(run)
        self._reporters[run] = send_report
        self._report_at_s = 0.0

    def _hand_back(self, run: str, leave: Callable[[], None]) -> None:
        self._tell(self._rows.hand_back(run, leave))

    def _leave(self, run: str, done: threading.Event) -> None:
        self._reporters.pop(run, None)
        self._tell(self._rows.leave(run))
        done.set()

    def _close(self) -> None:
        self._is_closed = True
        self._child.stop()
        for run in list(self._rows.runs):
            self._rows.leave(run)

    def _hear(self, child: EngineChild, message: dict[str, Any]) -> None:
        if child is not self._child:
            return
        self._pulse.heard(time.monotonic(), message.get("step_s", 0.0))
        match message["op"]:
            case "ready":
                logger.info("engine process %d ready after %.1f s", message["pid"], message["load_s"])
                # where nobody said, the engine chose for its device
                self._settings = self._settings.with_limits(message["batch_rows"], message["step_tokens"])
                self._meter.set(batch_rows=message["batch_rows"])
                self._policy.started()
                self._rows.process_ready()
                self._meter.process_started(message["pid"])
                self._report_at_s = 0.0
            case "results":
                self._policy.row_finished()
                for raw in message["results"]:
                    self._rows.finished(unpack_result(raw))
            case "exported":
                self._rows.exported(map(unpack_exported_row, message["rows"]))
            case "progress":
                self._meter.engine_said(unpack_telemetry(message["telemetry"]))
            case "fatal":
                self._fatal = message
            case "exited":
                self._child_exited(str(self._fatal.get("error", message["reason"])))

    def _child_exited(self, reason: str) -> None:
        logger.warning("engine process ended: %s (%d rows in it)", reason, self._rows.num_in_engine)
        is_permanent = bool(self._fatal.get("is_permanent", False))
        is_spared = self._shrink(reason)
        self._fatal = {}
        self._meter.process_died(reason)
        is_of_search = self._rows.is_searching and not is_spared
        num_blamed = self._rows.process_gone(reason, is_spared=is_spared)
        verdict = self._policy.died(reason, is_permanent, is_of_search=is_of_search, num_blamed=num_blamed)
        if isinstance(verdict, GiveUp):
            self._give_up(verdict.reason)
        else:
            self._restart_at_s = time.monotonic() + verdict.delay_s
        self._report_at_s = 0.0

    def _shrink(self, reason: str) -> bool:
        """After a death of memory the next process gets half the batch: then no row is to blame for this one."""
        kills_before, self._kernel_kills = self._kernel_kills, kernel_kills()
        by_kernel = self._kernel_kills > kills_before and "signal 9" in reason
        smaller = self._settings.halved() if by_kernel or self._fatal.get("is_out_of_memory") else None
        if smaller is None:
            return False
        logger.warning("out of memory: the next engine process runs %d rows at once", smaller.config.batch_rows)
        self._settings = smaller
        self._meter.set(batch_rows=smaller.config.batch_rows)
        return True

    def _give_up(self, reason: str) -> None:
        self._meter.set(state="failed", error=reason)
        self._rows.fail(EngineFailedError(f"The engine on {self._meter.latest.worker}: {reason}"))
        self._report_at_s = 0.0

    def _watch_pulse(self) -> None:
        problem = self._pulse.problem(time.monotonic(), is_ready=self._meter.latest.state == "ready")
        if problem is not None and self._restart_at_s is None:
            logger.error("engine process: %s; it is replaced", problem)
            self._fatal = {"error": problem}
            self._pulse.start(time.monotonic())
            self._child.stop()

    def _restart_if_due(self) -> None:
        if self._restart_at_s is not None and time.monotonic() >= self._restart_at_s and not self._is_closed:
            self._restart_at_s = None
            self._pulse.start(time.monotonic())
            self._child = self._new_child(self._settings)

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self._report_at_s and not self._rows.has_news:
            return
        self._rows.has_news = False
        self._report_at_s = now_s + REPORT_INTERVAL_S
        in_engine = self._rows.in_engine_by_run()
        for run, send_report in self._reporters.items():
            rows = self._rows.runs[run]
            # A run that is alone has the engine to itself, also between two rows.
            share = in_engine[run] / max(1, in_engine.total()) if len(self._reporters) > 1 else 1.0
            send_report(self._meter.report(rows.shards, rows.take_finished(), self._rows.lent_by_shard(run), share))


# Done in the keeper's thread; returns what the process must be told then.
Action = Callable[[EngineRows], Sequence[Message] | None]


class EngineShare:
    """Made by `EngineKeeper.join`. `run`: its name among the runs of this engine. `folder`: lives as long as the
    engine; what its rows refer to belongs there. `act`: has the keeper's thread do something.
    """

    def __init__(self, run: str, folder: Path, act: Callable[[Action], None]) -> None:
        self.run = run
        self.folder = folder
        self._act = act

    @property
    def log_path(self) -> Path:
        """What the engine process prints."""
        return engine_log(self.folder)

    def open(
        self,
        shard_id: int | None,
        rows: Iterable[ExportedRow],
        adapters: Iterable[LocalAdapter],
        rows_behind: int = 0,
    ) -> OpenShard:
        """Give rows to the engine, begun or not; results arrive at the returned shard under the same request ids, which
        must be unique among all rows that this run has open here. `shard_id` None: guests. `rows_behind`: see
        `ShardTask`.
        """
        shard = OpenShard(shard_id, rows, self.run)
        self._act(partial(EngineRows.open, shard=shard, adapters=tuple(adapters), rows_behind=rows_behind))
        return shard

    def abandon(self, shard: OpenShard) -> None:
        """Nobody waits for this shard any more; its rows leave the engine."""
        self._act(partial(EngineRows.abandon, shard=shard))

    def surrender(self, shard: OpenShard) -> None:
        """Fail a shard with `ShardAbandonedError`, once the process has given up what it has generated for its rows."""
        self._act(partial(EngineRows.surrender, shard=shard))

    def lend(self, shard_id: int, num_rows: int) -> Future[Loan]:
        """Take rows of an open shard out of the engine, for another engine to go on with: at most `num_rows`, fewer
        or none where rows have finished meanwhile. `answered` or `reclaim` must follow for each.
        """
        asked: Future[Loan] = Future()
        self._act(partial(EngineRows.lend, run=self.run, shard_id=shard_id, num_rows=num_rows, asked=asked))
        return asked

    def answered(self, served: Iterable[ServedRow]) -> None:
        """Another engine has finished rows that were lent. Those that nobody waits for are dropped."""
        self._act(partial(EngineRows.answered, served=tuple(served)))

    def returned(self, rows: Iterable[ExportedRow]) -> None:
        """Another engine gives lent rows back, further on than they were. They go on here."""
        self._act(partial(EngineRows.returned, rows=tuple(rows)))

    def reclaim(self, request_ids: Iterable[str]) -> None:
        """Lent rows go on here after all, from where they were when they left."""
        self._act(partial(EngineRows.reclaim, request_ids=tuple(request_ids)))


def engine_log(folder: Path) -> Path:
    """Where an engine process prints."""
    return folder / "engine.log"
