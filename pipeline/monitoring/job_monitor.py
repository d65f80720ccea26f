"""`JobMonitor`: derives a running job's state from reports and outcomes. Pure bookkeeping, without a clock."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from ...jobs.record import JobState, WorkerState
from ...jobs.status.worker_names import WorkerNames
from ...scheduler.estimates.lengths import PRIOR_SHARE, LengthEstimator
from ...scheduler.estimates.time_left import TimeLeft, Work
from ...scheduler.planning.bound import JobWork
from ...scheduler.planning.waves import Shard
from ..messages import PromptReuse, ShardOutcome, WorkerReport

# Seconds of one worker with shards queued from which it is said how full its batches were.
_LEAST_S = 5.0


class JobMonitor:
    """Counts rows, tokens and shards; `state` is what the display and `state.json` show."""

    def __init__(
        self,
        shards: Iterable[Shard],
        committed_rows: Mapping[int, int],
        adapter_names: Mapping[str, str],
        before: JobState | None = None,
        known_lengths: Collection[str] | None = (),
        num_reused: int = 0,
    ) -> None:
        """`committed_rows`: rows of the parts that exist already, by shard, `num_reused` of them of earlier runs.
        `before` has their errors and tokens, and how many rows were known to be done and reused. `known_lengths`:
        adapters whose answers' lengths the plan knew, from earlier jobs (None: of all, exactly).
        """
        self._shards = {shard.shard_id: shard for shard in shards}
        self._names = dict(adapter_names)
        self._rows_before = sum(committed_rows.values())
        self._before = before or JobState("starting", 0.0)
        self._num_reused = num_reused
        self._worker_names = WorkerNames(self._before.worker_addresses)
        self._most_done = self._before.rows_done
        self._committed = set(committed_rows)
        self._outcomes: dict[int, ShardOutcome] = {}
        self._reports: dict[str, WorkerReport] = {}
        self._fill = BatchFill()
        uncommitted = [shard for shard in self._shards.values() if shard.shard_id not in committed_rows]
        self._left = WorkLeft(uncommitted, known_lengths)

    def unknown_outcome(self, shard_id: int, worker: str) -> ShardOutcome:
        """For a part that is there although its worker is gone; the final count reads what it holds."""
        return ShardOutcome(shard_id, worker, self._shards[shard_id].num_rows, 0, 0, 0, 0)

    def committed(self, outcome: ShardOutcome) -> None:
        """A shard's part is in place."""
        self._outcomes[outcome.shard_id] = outcome
        if outcome.shard_id not in self._committed:
            self._left.committed(self._shards[outcome.shard_id])
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
        for rows in report.finished:
            name = self.adapter_name(rows.adapter_id) if rows.adapter_id else ""
            self._left.lengths.finished(rows.output_tokens, rows.num_rows, name)

    def saw(self, workers: Iterable[str]) -> None:
        """These workers are in the cluster."""
        self._worker_names.see(workers)

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self._reports.pop(worker, None)

    def adapter_name(self, adapter_id: str) -> str:
        """A name for a content hash; the base model is ""."""
        return self._names.get(adapter_id, adapter_id[:12])

    def work_left(self) -> Work:
        """Of rows that have no answer, less what engines have computed of those that run."""
        unfinished = self._unfinished()
        opened = [(self._shards[i], rows) for i, rows in unfinished.items() if i not in self._committed]
        telemetry = [report.telemetry for report in self._reports.values()]
        num_running, running_tokens = sum(t.num_running for t in telemetry), sum(t.running_tokens for t in telemetry)
        return self._left.now(opened, num_running, running_tokens)

    def state(self, now_s: float, left: TimeLeft | None = None) -> JobState:
        """Everything at one time, while shards run. `now_s`: seconds since the epoch."""
        rows = sum(shard.num_rows for shard in self._shards.values())
        done, before, outcomes = self._rows_done(), self._before, self._outcomes.values()
        return JobState(
            phase="running" if any(report.state == "ready" for report in self._reports.values()) else "loading engines",
            updated_at_s=now_s,
            rows=rows,
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
            workers=tuple(self._worker_state(self._reports[worker]) for worker in self._present()),
            worker_addresses=self._worker_names.addresses,
        )

    def _rows_done(self) -> int:
        """Rows of committed shards, and finished ones of shards that are open somewhere: the most that there ever were.
        Those of a worker that is lost are in its journals, and are found again when its shards are opened.
        """
        started = sum(
            self._shards[shard_id].num_rows - rows
            for shard_id, rows in self._unfinished().items()
            if shard_id not in self._committed
        )
        done = self._rows_before + sum(outcome.num_rows for outcome in self._outcomes.values()) + started
        self._most_done = max(self._most_done, done)
        return self._most_done

    def _unfinished(self) -> dict[int, int]:
        """Rows without a result of each shard that is open somewhere."""
        unfinished: dict[int, int] = {}
        for report in self._reports.values():
            for shard_id, rows in report.open_shards:
                if shard_id in self._shards:
                    unfinished[shard_id] = min(rows, unfinished.get(shard_id, rows))
        return unfinished

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
            adapter_loads=telemetry.adapter_loads,
            adapter_stall_s=telemetry.adapter_stall_s,
        )


class WorkLeft:
    """Adds up the work of shards that are not committed, by the adapters that they have together. `known_lengths`: see
    `JobMonitor`.
    """

    def __init__(self, shards: Iterable[Shard], known_lengths: Collection[str] | None = ()) -> None:
        self._is_exact = known_lengths is None
        self._known = frozenset(known_lengths or ())
        #: Of this run's answers so far.
        self.lengths = LengthEstimator()
        # Lengths of the longest rows, and how many uncommitted shards have each.
        self._longest: Counter[int] = Counter()
        # Adapters -> rows, prompt tokens, predicted output tokens.
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for shard in shards:
            self._add(shard, 1.0)

    def committed(self, shard: Shard) -> None:
        """A shard's part is in place."""
        self._add(shard, -1.0)

    def _add(self, shard: Shard, share: float) -> None:
        if shard.has_engine_work:
            self._longest[shard.longest_output_tokens] += 1 if share > 0 else -1
            counts = self._sums[shard.adapters]
            for i, value in enumerate((shard.num_rows, shard.prompt_tokens, shard.predicted_output_tokens)):
                counts[i] += share * value

    def now(self, opened: Iterable[tuple[Shard, int]], num_running: int, running_tokens: int) -> Work:
        """What is left, as `JobMonitor.work_left` says. `opened`: shards and their rows without a result."""
        num_rows = prompt = output = guessed = 0.0
        done = WorkLeft(())
        for shard, rows_left in opened:
            done._add(shard, 1 - rows_left / shard.num_rows)
        for adapters, (rows, prompt_tokens, predicted) in self._sums.items():
            finished = done._sums.get(adapters, (0.0, 0.0, 0.0))
            rows, prompt_tokens, predicted = rows - finished[0], prompt_tokens - finished[1], predicted - finished[2]
            if rows < 0.5:
                continue
            mean = None if self._is_exact else self.lengths.measured_together(adapters)
            is_known = self._is_exact or mean is not None or self._known.issuperset(adapters or ("",))
            num_rows, prompt = num_rows + rows, prompt + prompt_tokens
            output += predicted if mean is None else rows * mean
            guessed += 0.0 if is_known else predicted
        if not num_rows:
            return Work()
        num_running = min(num_running, round(num_rows))
        mean_left = output / num_rows - running_tokens / max(1, num_running)
        if num_running and not self._is_exact:
            # Those that run are the longer ones of those that began.
            mean_left = max(mean_left, self.lengths.left(running_tokens / num_running, 2 * output / num_rows))
        running_left = num_running * max(mean_left, 0.0)
        waiting = 1 - num_running / num_rows
        longest = self._longest_left(num_rows, num_running, running_tokens)
        return Work(num_rows, prompt * waiting, output * waiting + running_left, guessed, longest)

    def _longest_left(self, num_rows: float, num_running: int, running_tokens: int) -> float:
        """Tokens that the longest row still has to generate."""
        planned = max((tokens for tokens, count in self._longest.items() if count > 0), default=0)
        # While rows wait, the longest may be among them.
        generated = running_tokens / num_running if num_running and num_running > num_rows - 1 else 0.0
        if self._is_exact:
            return max(0.0, planned - generated)
        # Of rows whose ends are independent, the last one lasts as long as a harmonic sum of them.
        most = planned / PRIOR_SHARE
        mean_left = self.lengths.left(generated, most)
        return max(0.0, min(most - generated, mean_left * (0.58 + math.log(max(1.0, num_rows)))))


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
