"""Keeps one engine process alive and its rows accounted for. No Dask: `engine_host.py` puts it on a worker.

All state belongs to one thread, which takes messages from a queue: from the engine process, from tasks that
open or give up shards, and from `close`. Results go straight to the shard that waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.exported_row import ExportedRow
from ..engine.out_of_memory import kernel_kills
from ..engine.request import Request, Result
from ..engine.wire import unpack_exported_row, unpack_result, unpack_telemetry
from .engine_child import EngineChild
from .engine_feed import EngineFeed
from .engine_pulse import EnginePulse
from .errors import EngineFailedError, ShardAbandonedError
from .host_meter import HostMeter
from .loan_desk import Loan, LoanDesk
from .messages import EngineSettings, HostReport, LocalAdapter
from .open_shard import OpenShard, ServedRow
from .restart_policy import GiveUp, RestartPolicy
from .row_ledger import RowLedger

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0


class EngineKeeper:
    """One engine process, restarted when it dies, and the open shards whose rows it works on.

    `find_model` returns the local model folder (it may download). `send_report` is called about once a second.
    """

    def __init__(
        self,
        settings: EngineSettings,
        find_model: Callable[[], Path],
        log_path: Path,
        send_report: Callable[[HostReport], None],
        worker: str,
    ) -> None:
        self._settings = settings
        self._new_child = partial(EngineChild, find_model, log_path, self._overhear)
        self._send_report = send_report
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._ledger = RowLedger()
        self._policy = RestartPolicy()
        self._meter = HostMeter(worker, settings.config.max_batch_rows)
        self._shards: list[OpenShard] = []
        # request id -> the shard that waits for it, and the request.
        self._waits: dict[str, tuple[OpenShard, Request]] = {}
        self._feed = EngineFeed()
        self._desk = LoanDesk(self._ledger)
        self._fatal: dict[str, Any] = {}
        self._failure: Exception | None = None
        self._is_closed = False
        self._restart_at_s: float | None = None
        self._report_at_s = 0.0
        self._pulse = EnginePulse(time.monotonic())
        self._kernel_kills = kernel_kills()
        self._child = self._new_child(settings)
        self._thread = threading.Thread(target=self._run, name="engine keeper", daemon=True)
        self._thread.start()

    # Called from other threads

    def open(self, shard_id: int, requests: Iterable[Request], adapters: Iterable[LocalAdapter]) -> OpenShard:
        """Give rows to the engine; results arrive at the returned shard under the same request ids, which must
        be unique among all rows open here.
        """
        return self._accept(OpenShard(shard_id, map(ExportedRow, requests)), adapters)

    def open_guests(self, rows: Iterable[ExportedRow], adapters: Iterable[LocalAdapter]) -> OpenShard:
        """Likewise for rows of another worker's shard, begun or not."""
        return self._accept(OpenShard(None, rows), adapters)

    def lend(self, shard_id: int, num_rows: int) -> Future[Loan]:
        """Take rows of an open shard out of the engine, for another engine to go on with: at most `num_rows`, fewer
        or none where rows have finished meanwhile. `answered` or `reclaim` must follow for each.
        """
        asked: Future[Loan] = Future()
        self._inbox.put(("lend", (shard_id, num_rows, asked)))
        return asked

    def answered(self, rows: Iterable[ServedRow]) -> None:
        """Another engine has finished rows that were lent. Those that nobody waits for are dropped."""
        self._inbox.put(("answered", tuple(rows)))

    def reclaim(self, request_ids: Iterable[str]) -> None:
        """Lent rows go on here after all, from where they were when they left."""
        self._inbox.put(("reclaim", tuple(request_ids)))

    def _accept(self, shard: OpenShard, adapters: Iterable[LocalAdapter]) -> OpenShard:
        self._inbox.put(("open", (shard, tuple(adapters))))
        return shard

    def abandon(self, shard: OpenShard) -> None:
        """Nobody waits for this shard any more; its rows leave the engine."""
        self._inbox.put(("abandon", shard))

    def close(self, timeout_s: float) -> None:
        """Fail what is open with `ShardAbandonedError` and end the process; wait for both."""
        self._inbox.put(("close", None))
        self._thread.join(timeout_s)
        self._child.join(timeout_s)

    def _overhear(self, child: EngineChild, message: dict[str, Any]) -> None:
        self._inbox.put(("child", (child, message)))

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
        try:
            kind, content = self._inbox.get(timeout=self._patience_s())
        except queue.Empty:
            pass
        else:
            self._handle(kind, content)
        self._watch_pulse()
        self._restart_if_due()
        self._send_rows()
        self._report_if_due()

    def _refuse_until_closed(self) -> None:
        while not self._is_closed:
            kind, content = self._inbox.get()
            if kind in ("open", "lend", "close"):
                self._handle(kind, content)

    def _patience_s(self) -> float:
        due_s = min(self._report_at_s, self._restart_at_s or self._report_at_s)
        return max(0.001, due_s - time.monotonic())

    def _handle(self, kind: str, content: Any) -> None:
        match kind:
            case "open":
                self._open(*content)
            case "abandon":
                self._abandon(content)
            case "lend":
                self._lend(*content)
            case "answered":
                for row in content:
                    self._finish(row.result, row.num_crashes)
            case "reclaim":
                self._ledger.reclaim(content)
            case "close":
                self._close()
            case "child":
                child, message = content
                if child is self._child:
                    self._pulse.heard(time.monotonic(), message.get("step_s", 0.0))
                    self._hear(message)

    def _open(self, shard: OpenShard, adapters: Sequence[LocalAdapter]) -> None:
        if self._failure is not None:
            shard.fail(self._failure)
            return
        self._shards.append(shard)
        if shard.shard_id is None:
            # Whoever lent them out waits to hear that they came, and below that they are done.
            self._report_at_s = 0.0
        self._feed.learn(adapters)
        self._waits.update({row.request.request_id: (shard, row.request) for row in shard.rows})
        self._ledger.add(shard.rows)

    def _abandon(self, shard: OpenShard) -> None:
        shard.is_abandoned = True
        if shard in self._shards:
            self._shards.remove(shard)
            for request_id in shard.request_ids:
                self._waits.pop(request_id, None)
            to_abort = self._ledger.forget(shard.request_ids)
            if to_abort:
                self._child.send({"op": "abort", "request_ids": to_abort})

    def _lend(self, shard_id: int, num_rows: int, asked: Future[Loan]) -> None:
        shard = next((shard for shard in self._shards if shard.shard_id == shard_id), None)
        chosen = self._desk.ask(shard if self._meter.latest.state == "ready" else None, num_rows, asked)
        if chosen:
            self._child.send({"op": "export", "request_ids": chosen})

    def _close(self) -> None:
        self._is_closed = True
        self._child.stop()
        self._fail(ShardAbandonedError("The worker stopped before the shard was done."))

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._desk.close()
        for shard in self._shards:
            shard.fail(failure)
        self._shards.clear()

    def _hear(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "ready":
                logger.info("engine process %d ready after %.1f s", message["pid"], message["load_s"])
                self._policy.started()
                self._meter.process_started(message["pid"])
                self._report_at_s = 0.0
            case "results":
                self._policy.row_finished()
                for raw in message["results"]:
                    self._finish(unpack_result(raw))
            case "exported":
                self._desk.exported(map(unpack_exported_row, message["rows"]))
            case "progress":
                self._meter.engine_said(unpack_telemetry(message["telemetry"]))
            case "fatal":
                self._fatal = message
            case "exited":
                self._child_exited(str(self._fatal.get("error", message["reason"])))

    def _finish(self, result: Result, crashes_elsewhere: int = 0) -> None:
        """Hand a result on, unless nobody waits for it any more."""
        if self._failure is None and result.request_id in self._ledger:
            num_crashes = self._ledger.crashes_of(result.request_id) + crashes_elsewhere
            self._ledger.finished(result.request_id)
            self._hand_on(ServedRow(result, num_crashes))

    def _hand_on(self, row: ServedRow) -> None:
        shard, request = self._waits.pop(row.result.request_id)
        self._meter.row_finished(request.adapter_id, row.result.completion_tokens)
        shard.deliver(row)
        if not shard.num_unfinished:
            self._shards.remove(shard)
            if not self._shards:
                self._report_at_s = 0.0

    def _child_exited(self, reason: str) -> None:
        logger.warning("engine process ended: %s (%d rows in it)", reason, self._ledger.num_in_engine)
        is_permanent = bool(self._fatal.get("is_permanent", False))
        spared = self._shrink(reason)
        self._fatal = {}
        self._feed.new_process()
        self._desk.close()
        self._meter.process_died(reason)
        if spared:
            self._ledger.interrupted()
        else:
            self._give_up_rows(reason)
        verdict = self._policy.died(reason, is_permanent)
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
        logger.warning("out of memory: the next engine process runs %d rows at once", smaller.config.max_batch_rows)
        self._settings = smaller
        self._meter.set(batch_rows=smaller.config.max_batch_rows)
        return True

    def _give_up(self, reason: str) -> None:
        self._meter.set(state="failed", error=reason)
        self._fail(EngineFailedError(f"The engine on {self._meter.latest.worker}: {reason}"))
        self._report_at_s = 0.0

    def _give_up_rows(self, reason: str) -> None:
        for row in self._ledger.crashed():
            error = f"the engine process died each time it worked on this row, last because {reason}"
            self._hand_on(ServedRow.given_up(row.row.request, error, row.crashes))

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

    def _send_rows(self) -> None:
        """Send the rows that may run."""
        if self._meter.latest.state == "ready" and not self._is_closed:
            for message in self._feed.messages(self._ledger.take()):
                self._child.send(message)

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._report_at_s:
            self._report_at_s = now_s + REPORT_INTERVAL_S
            owners = (self._waits[request_id][0].shard_id for request_id in self._ledger.lent)
            lent = Counter(shard_id for shard_id in owners if shard_id is not None)
            self._send_report(self._meter.report(self._shards, lent))
