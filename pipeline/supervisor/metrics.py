"""`EngineMeter`: turns an engine's telemetry into `WorkerReport`s, one after another for each run that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...engine.telemetry import EngineTelemetry
from ...scheduler.messages import FinishedRows, UnfinishedRows
from ..messages import WorkerReport
from .open_shard import OpenShard

# Least seconds over which rates are counted. A worker that was held up reads several snapshots at once.
_LEAST_RATED_S = 0.5


class EngineMeter:
    """The latest state of one engine. It holds no clock: times are the caller's, in seconds."""

    def __init__(self, worker: str, batch_rows: int, now_s: float) -> None:
        #: The state as last set.
        self.latest = WorkerReport(worker, "starting", batch_rows)
        self._counted_s = now_s
        # Snapshot from which the next rates count, and its time.
        self._rated = EngineTelemetry(), now_s

    def set(self, **changes: Any) -> None:
        """Change fields of the coming reports."""
        self.latest = replace(self.latest, **changes)

    def process_started(self, pid: int, now_s: float) -> None:
        """Record a new engine process that is ready: its counts start at 0."""
        self._counted_s = now_s
        self._rated = EngineTelemetry(), now_s
        self.set(state="ready", engine_pid=pid, telemetry=EngineTelemetry())

    def process_died(self, reason: str) -> None:
        """Record the end of the engine process."""
        self.set(
            state="restarting",
            error=reason,
            engine_pid=None,
            num_crashes=self.latest.num_crashes + 1,
            telemetry=EngineTelemetry(),
            tokens_per_s=0.0,
            prompt_tokens_per_s=0.0,
        )

    def progressed(self, telemetry: EngineTelemetry, now_s: float) -> None:
        """Record a snapshot of the engine process; rates are over at least `_LEAST_RATED_S` seconds."""
        seconds = max(now_s - self._counted_s, 1e-3)
        self._counted_s = now_s
        before = self.latest.telemetry
        share = (telemetry.filled_steps - before.filled_steps) / max(1, telemetry.num_steps - before.num_steps)
        filled_s = share * min(telemetry.busy_s - before.busy_s, seconds)
        self.set(
            telemetry=telemetry,
            filled_s=self.latest.filled_s + filled_s,
            elapsed_s=self.latest.elapsed_s + seconds,
        )
        self._rate(telemetry, now_s)

    def _rate(self, telemetry: EngineTelemetry, now_s: float) -> None:
        before, since_s = self._rated
        if (seconds := now_s - since_s) < _LEAST_RATED_S:
            return
        self._rated = telemetry, now_s
        self.set(
            tokens_per_s=(telemetry.generated_tokens - before.generated_tokens) / seconds,
            prompt_tokens_per_s=(telemetry.prompt_tokens - before.prompt_tokens) / seconds,
        )

    def report(
        self,
        open_shards: Iterable[OpenShard],
        finished: tuple[FinishedRows, ...] = (),
        lent: Mapping[int, int] | None = None,
        share: float = 1.0,
    ) -> WorkerReport:
        """The next report of one run.

        `finished`: rows finished since the run's last report. `lent`: shard -> its rows that other engines work on.
        `share`: share of the engine's rows that are the run's; running rows and rates are reported in this proportion.
        """
        own: list[UnfinishedRows] = []
        incoming_rows = 0
        for shard in open_shards:
            if shard.shard_id is None:
                incoming_rows += shard.num_unfinished
            else:
                own.append(UnfinishedRows(shard.shard_id, shard.planned_rows_left))
        # A row with several requests counts once, and each of them may be away.
        left = {rows.shard_id: rows.num_rows for rows in own}
        away = {shard_id: min(num_rows, left.get(shard_id, num_rows)) for shard_id, num_rows in (lent or {}).items()}
        latest, telemetry = self.latest, self.latest.telemetry
        return replace(
            latest,
            open_shards=tuple(own),
            incoming_rows=incoming_rows,
            lent_shards=tuple(UnfinishedRows(shard_id, num_rows) for shard_id, num_rows in away.items()),
            finished=finished,
            telemetry=replace(
                telemetry,
                num_running=round(share * telemetry.num_running),
                num_prefilling=round(share * telemetry.num_prefilling),
                prefill_tokens_left=round(share * telemetry.prefill_tokens_left),
                running_tokens=round(share * telemetry.running_tokens),
            ),
            tokens_per_s=share * latest.tokens_per_s,
            prompt_tokens_per_s=share * latest.prompt_tokens_per_s,
        )
