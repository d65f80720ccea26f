"""`JobMonitor`: derives a running job's state from reports and outcomes. Pure bookkeeping, without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import nsmallest

from ...engine.adapter_use import AdapterUse
from ...jobs.progress import AdapterCount
from ...jobs.record import JobState, WorkerState
from ...jobs.status.worker_names import WorkerNames
from ...scheduler.estimates.time_left import TimeLeft
from ...scheduler.planning.bound import JobWork
from ...scheduler.planning.waves import Shard
from ..messages import PromptReuse, ShardOutcome, WorkerReport

# Seconds of workers, with shards queued, from which on the fill of batches is known.
_LEAST_S = 5.0
#: Most adapters whose rows are counted while a job runs.
ADAPTERS_COUNTED = 50
# Longer names are of no adapter, and would make each state large.
_NAME_CHARACTERS = 255


class JobMonitor:
    """Counts rows, tokens and shards of a running job; the display and `state.json` show its `state`."""

    def __init__(
        self,
        shards: Iterable[Shard],
        committed: Collection[int],
        adapter_names: Mapping[str, str],
        before: JobState | None = None,
        num_reused: int = 0,
        adapter_rows: Mapping[str | None, int] | None = None,
        done: Iterable[AdapterCount] = (),
    ) -> None:
        """Begin with the parts that exist already. `committed`: their shards; `num_reused` of their rows are of earlier
        runs. `before`: state with their errors and tokens, and with the numbers of rows that were known to be done and
        reused. `adapter_names`: content hash -> name. `adapter_rows`: name (None: base model) -> rows of the job.
        `done`: counts of the rows in parts by adapter.
        """
        self._shards = {shard.shard_id: shard for shard in shards}
        self._names = dict(adapter_names)
        self._before = before or JobState("starting", 0.0)
        self._num_reused = num_reused
        self._worker_names = WorkerNames(self._before.worker_addresses)
        self._most_done = self._before.rows_done
        self._num_rows = sum(shard.num_rows for shard in self._shards.values())
        self._committed = set(committed)
        self._outcomes: dict[int, ShardOutcome] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._fill = BatchFill()
        self._use = self._before.adapter_use
        self._adapters = _AdapterCounts(adapter_rows or {})
        self._adapters.written(done)
        # Rows that were done at the last sign of progress, and its time in seconds since the epoch.
        self._moved: tuple[int, float] | None = None
        # Whether a report since the latest state tells of tokens.
        self._has_computed = False

    def unknown_outcome(self, shard_id: int, worker: str) -> ShardOutcome:
        """The outcome of a shard whose part exists although its worker is gone: rows only. The final count reads the
        part.
        """
        return ShardOutcome(shard_id, worker, self._shards[shard_id].num_rows, 0, 0, 0, 0)

    def committed(self, outcome: ShardOutcome) -> None:
        """Take in the outcome of a shard whose part is written."""
        self._outcomes[outcome.shard_id] = outcome
        self._committed.add(outcome.shard_id)
        self._adapters.written(outcome.adapters)

    @property
    def batch_fill(self) -> float | None:
        """Share to which steps were full while shards were queued, from 0 to 1; None when that time was too
        short.
        """
        return self._fill.share

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens of this run's shards that were reused; None before the first one."""
        return PromptReuse.total(outcome.reuse for outcome in self._outcomes.values()).share

    @property
    def work(self) -> JobWork | None:
        """Work that engines did for the rows of this run's shards; None when the work of a shard is not known."""
        parts = [outcome.work for outcome in self._outcomes.values() if outcome.work is not None]
        return JobWork.total(parts) if len(parts) == len(self._outcomes) else None

    def reported(self, report: WorkerReport, is_tail: bool = False) -> None:
        """Take in a report. `is_tail`: whether no shard was queued any more."""
        self._has_computed |= report.tokens_per_s + report.prompt_tokens_per_s > 0
        if not is_tail:
            self._fill.reported(report)
        for rows in report.finished:
            name = "" if rows.adapter_id is None else self._names.get(rows.adapter_id)
            self._adapters.finished(name, rows.num_rows)
        before = self._reports.get(report.worker)
        if before is not None:
            # Counts before the first report may be of other runs.
            engine, fetches = report.telemetry.adapters, report.fetches
            self._use += engine.since(before.telemetry.adapters) + fetches.since(before.fetches)
        self._reports[report.worker] = report

    @property
    def adapter_use(self) -> AdapterUse:
        """Costs of adapters on all workers while the run had them; where runs share an engine, all of the engine."""
        return self._use

    def saw(self, workers: Iterable[str]) -> None:
        """Note that these workers are in the cluster."""
        self._worker_names.see(workers)

    def lost(self, worker: str) -> None:
        """Forget the report of a worker that is gone."""
        if self._reports.pop(worker, None) is not None:
            self._adapters.lost()

    def state(self, now_s: float, rows_left: int, left: TimeLeft | None = None) -> JobState:
        """The job's state at one time, while shards run. `now_s`: seconds since the epoch. `rows_left`: rows without a
        result, as the scheduler counts them. Finished rows of a lost worker are in its journals, and are found again
        when its shards are opened: the rows that are done are never fewer than before.
        """
        done = self._most_done = max(self._most_done, self._num_rows - rows_left)
        before, outcomes = self._before, self._outcomes.values()
        return JobState(
            phase="running" if any(report.state == "ready" for report in self._reports.values()) else "loading engines",
            updated_at_s=now_s,
            rows=self._num_rows,
            rows_done=done,
            rows_error=before.rows_error + sum(outcome.num_errors for outcome in outcomes),
            rows_reused=max(before.rows_reused, self._num_reused + sum(outcome.num_reused for outcome in outcomes)),
            shards=len(self._shards),
            shards_done=len(self._committed),
            prompt_tokens=before.prompt_tokens + sum(outcome.prompt_tokens for outcome in outcomes),
            completion_tokens=before.completion_tokens + sum(outcome.completion_tokens for outcome in outcomes),
            tokens_per_s=sum(report.tokens_per_s for report in self._reports.values()),
            batch_fill=self.batch_fill,
            prefix_hit_rate=self.prefix_hit_rate,
            eta_s=None if left is None else left.seconds,
            eta_range_s=None if left is None else (left.least_s, left.most_s),
            adapter_use=self._use,
            workers=tuple(self._worker_state(self._reports[worker]) for worker in self._present()),
            worker_addresses=self._worker_names.addresses,
            still_s=self._still_s(done, now_s),
            adapter_rows=self._adapters.rows,
            adapters=self._adapters.done,
        )

    def _still_s(self, rows_done: int, now_s: float) -> float:
        if self._moved is None or self._has_computed or rows_done != self._moved[0]:
            self._moved = rows_done, now_s
        self._has_computed = False
        return max(0.0, now_s - self._moved[1])

    def _present(self) -> list[str]:
        """Workers that report, `w0` first."""
        named = [worker for worker in self._worker_names.addresses if worker in self._reports]
        return named + [worker for worker in self._reports if worker not in named]

    def _worker_state(self, report: WorkerReport) -> WorkerState:
        telemetry = report.telemetry
        return WorkerState(
            name=self._worker_names.name(report.worker),
            address=report.worker,
            tokens_per_s=report.tokens_per_s,
            open_rows=report.open_rows,
            running_rows=telemetry.num_running,
            mode=telemetry.mode if report.state == "ready" else report.state,
            # An engine that runs share holds adapters of other jobs too.
            resident_adapters=tuple(self._names[i] for i in telemetry.resident_adapter_ids if i in self._names),
            lent_rows=report.lent_rows,
            incoming_rows=report.incoming_rows,
            prefix_hit_rate=telemetry.prefix_hit_rate,
            adapters=telemetry.adapters + report.fetches,
            pages=telemetry.pages_total,
            used_pages=telemetry.pages_used,
            adapter_pages=telemetry.adapter_pages,
            prefix_pages=telemetry.prefix_pages,
            host_tier_bytes=telemetry.host_tier_bytes,
            host_tier_used_bytes=telemetry.host_tier_used_bytes,
            adapter_copies_bytes=report.adapter_copies_bytes,
        )


class _AdapterCounts:
    """Counts the done rows of the adapters with the most rows: those in parts, and those that engines have finished
    since. `adapter_rows`: name (None and "": base model) -> rows of the job.
    """

    def __init__(self, adapter_rows: Mapping[str | None, int]) -> None:
        rows: Counter[str] = Counter()
        for name, num_rows in adapter_rows.items():
            rows[name or ""] += num_rows
        usual = [name for name, num_rows in rows.items() if num_rows and len(name) <= _NAME_CHARACTERS]
        most = nsmallest(ADAPTERS_COUNTED, usual, key=lambda name: (-rows[name], name))
        #: Rows of these adapters, in order of names.
        self.rows = {name: rows[name] for name in sorted(most)}
        self._written = {name: AdapterCount(name, 0, 0, 0) for name in self.rows}
        # Rows that engines have finished, and that were in no part when last counted.
        self._open = dict.fromkeys(self.rows, 0)

    def finished(self, name: str | None, num_rows: int) -> None:
        """Take in rows that an engine has finished."""
        if name in self._open:
            self._open[name] += num_rows

    def written(self, counts: Iterable[AdapterCount]) -> None:
        """Take in the rows of parts that were written."""
        for count in counts:
            if (before := self._written.get(count.adapter)) is not None:
                self._open[count.adapter] = max(0, self._open[count.adapter] - count.num_rows)
                self._written[count.adapter] = AdapterCount(
                    count.adapter,
                    before.num_rows + count.num_rows,
                    before.num_errors + count.num_errors,
                    before.completion_tokens + count.completion_tokens,
                )

    def lost(self) -> None:
        """Note that a worker is gone, perhaps with finished rows. They count when their parts are written."""
        self._open = dict.fromkeys(self.rows, 0)

    @property
    def done(self) -> tuple[AdapterCount, ...]:
        """Done rows of each adapter."""
        return tuple(
            replace(count, num_rows=min(self.rows[name], count.num_rows + self._open[name]))
            for name, count in self._written.items()
        )


class BatchFill:
    """Adds up the seconds of full steps, and all seconds, since each worker had its first rows."""

    def __init__(self) -> None:
        # Worker -> (seconds of full steps, all seconds) when it had its first rows, and as last reported.
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def reported(self, report: WorkerReport) -> None:
        """Take in a report of a time when shards were queued."""
        if report.open_rows or report.worker in self._first:
            counted = (report.filled_s, report.elapsed_s)
            self._first.setdefault(report.worker, counted)
            self._last[report.worker] = counted

    @property
    def share(self) -> float | None:
        """Share to which steps were full, from 0 to 1. None until `_LEAST_S` of workers were seen: in the first seconds
        prompts are computed.
        """
        filled, elapsed = (sum(column) for column in zip((0.0, 0.0), *self._spans(), strict=True))
        return min(1.0, filled / elapsed) if elapsed >= _LEAST_S else None

    def _spans(self) -> Iterator[tuple[float, float]]:
        for worker, (filled, elapsed) in self._last.items():
            filled_before, elapsed_before = self._first[worker]
            yield filled - filled_before, elapsed - elapsed_before
