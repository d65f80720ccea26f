"""`JobMonitor`: derives a running job's state from reports and outcomes. Pure bookkeeping, without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from ...jobs.record import JobState, WorkerState
from ...scheduler.bound import JobWork
from ...scheduler.waves import Shard
from ..messages import PromptReuse, ShardOutcome, WorkerReport

# Rates and the time left are judged over this many seconds.
_WINDOW_S = 30.0
# Seconds of one worker with shards queued from which it is said how full its batches were.
_LEAST_S = 5.0


class JobMonitor:
    """Counts rows, tokens and shards; `state` is what the display and `state.json` show."""

    def __init__(
        self,
        shards: Iterable[Shard],
        committed_rows: Mapping[int, int],
        adapter_names: Mapping[str, str],
        num_errors: int = 0,
    ) -> None:
        """`committed_rows`: rows of the parts that exist already, by shard; `num_errors` of all these are errors."""
        self._shards = {shard.shard_id: shard for shard in shards}
        self._names = dict(adapter_names)
        self._rows_before = sum(committed_rows.values())
        self._errors_before = num_errors
        self._committed = set(committed_rows)
        self._outcomes: dict[int, ShardOutcome] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._history: deque[tuple[float, int]] = deque()
        self._fill = BatchFill()

    @property
    def outcomes(self) -> tuple[ShardOutcome, ...]:
        """Shards that this run committed."""
        return tuple(self._outcomes.values())

    def unknown_outcome(self, shard_id: int, worker: str) -> ShardOutcome:
        """For a part that is there although its worker is gone; the final count reads what it holds."""
        return ShardOutcome(shard_id, worker, self._shards[shard_id].num_rows, 0, 0, 0, 0)

    def committed(self, outcome: ShardOutcome) -> None:
        """A shard's part is in place."""
        self._outcomes[outcome.shard_id] = outcome
        self._committed.add(outcome.shard_id)

    @property
    def batch_fill(self) -> float | None:
        """How full batches were while shards were queued, from 0 to 1; None when there was no such time."""
        return self._fill.share

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens of this run's shards that were reused; None before the first one."""
        return PromptReuse.total(outcome.reuse for outcome in self._outcomes.values()).share

    @property
    def work(self) -> JobWork | None:
        """What engines did for the rows of this run's shards; None where one of them is not known."""
        parts = [outcome.work for outcome in self._outcomes.values() if outcome.work is not None]
        return JobWork.total(parts) if len(parts) == len(self._outcomes) else None

    def reported(self, report: WorkerReport, is_tail: bool = False) -> None:
        """Take in a report. `is_tail`: no shard was queued any more."""
        if not is_tail:
            self._fill.reported(report)
        self._reports[report.worker] = report

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._reports.pop(worker, None)

    def adapter_name(self, adapter_id: str) -> str:
        """A name for a content hash; the base model is ""."""
        return self._names.get(adapter_id, adapter_id[:12])

    def state(self, now_s: float) -> JobState:
        """Everything at one time, while shards run. `now_s`: seconds since the epoch."""
        rows = sum(shard.num_rows for shard in self._shards.values())
        done = self._rows_done()
        self._history.append((now_s, done))
        while len(self._history) > 2 and now_s - self._history[0][0] > _WINDOW_S:
            self._history.popleft()
        return JobState(
            phase="running",
            updated_at_s=now_s,
            rows=rows,
            rows_done=done,
            rows_error=self._errors_before + sum(outcome.num_errors for outcome in self._outcomes.values()),
            shards=len(self._shards),
            shards_done=len(self._committed),
            prompt_tokens=sum(outcome.prompt_tokens for outcome in self._outcomes.values()),
            completion_tokens=sum(outcome.completion_tokens for outcome in self._outcomes.values()),
            tokens_per_s=sum(report.tokens_per_s for report in self._reports.values()),
            batch_fill=self.batch_fill,
            prefix_hit_rate=self.prefix_hit_rate,
            eta_s=self._eta_s(rows - done),
            workers=tuple(self._worker_state(report) for report in self._reports.values()),
        )

    def _rows_done(self) -> int:
        """Rows of committed shards, and finished ones of shards that are open somewhere."""
        unfinished: dict[int, int] = {}
        for report in self._reports.values():
            for shard_id, rows in report.open_shards:
                unfinished[shard_id] = min(rows, unfinished.get(shard_id, rows))
        started = sum(
            self._shards[shard_id].num_rows - rows
            for shard_id, rows in unfinished.items()
            if shard_id in self._shards and shard_id not in self._committed
        )
        return self._rows_before + sum(outcome.num_rows for outcome in self._outcomes.values()) + started

    def _eta_s(self, rows_left: int) -> float | None:
        (first_s, first_rows), (last_s, last_rows) = self._history[0], self._history[-1]
        if rows_left <= 0:
            return 0.0
        if last_rows <= first_rows or last_s <= first_s:
            return None
        return rows_left * (last_s - first_s) / (last_rows - first_rows)

    def _worker_state(self, report: WorkerReport) -> WorkerState:
        telemetry = report.telemetry
        return WorkerState(
            name=report.worker,
            tokens_per_s=report.tokens_per_s,
            open_rows=report.open_rows,
            running_rows=telemetry.num_running,
            mode=telemetry.mode if report.state == "ready" else report.state,
            # An engine that runs share holds adapters of other jobs too.
            resident_adapters=tuple(self._names[i] for i in telemetry.resident_adapter_ids if i in self._names),
            lent_rows=report.lent_rows,
            incoming_rows=report.incoming_rows,
            prefix_hit_rate=telemetry.prefix_hit_rate,
            adapter_loads=telemetry.adapter_loads,
            adapter_stall_s=telemetry.adapter_stall_s,
        )


class BatchFill:
    """Adds up what reports count since each worker had its first rows."""

    def __init__(self) -> None:
        # Worker -> (used, offered) place-seconds when it had its first rows, and the latest.
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}
        self._batch_rows = 1

    def reported(self, report: WorkerReport) -> None:
        """Take in a report of a time when shards were queued."""
        self._batch_rows = max(self._batch_rows, report.batch_rows)
        if report.open_rows or report.worker in self._first:
            counted = (report.used_place_s, report.offered_place_s)
            self._first.setdefault(report.worker, counted)
            self._last[report.worker] = counted

    @property
    def share(self) -> float | None:
        """Of all places in batches, times seconds, those that rows had. None before there were some seconds of it: in
        the first ones prompts are computed.
        """
        used, offered = (sum(column) for column in zip((0.0, 0.0), *self._spans(), strict=True))
        return min(1.0, used / offered) if offered >= _LEAST_S * self._batch_rows else None

    def _spans(self) -> Iterator[tuple[float, float]]:
        for worker, (used, offered) in self._last.items():
            used_before, offered_before = self._first[worker]
            yield used - used_before, offered - offered_before
