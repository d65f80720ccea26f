"""`JobMonitor`: derives a running job's state from reports and outcomes. Pure bookkeeping, without a clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...jobs.record import JobState, WorkerState
from ...jobs.status.worker_names import WorkerNames
from ...scheduler.estimates.lengths import PRIOR_SHARE, AnswerLengths, LengthDistribution, LengthEstimator
from ...scheduler.estimates.time_left import TimeLeft, Work
from ...scheduler.planning.bound import JobWork
from ...scheduler.planning.waves import Shard
from ..messages import PromptReuse, ShardOutcome, WorkerReport

# Seconds of one worker's batches, with shards queued, from which on the fill of batches is known.
_LEAST_S = 5.0


class JobMonitor:
    """Counts rows, tokens and shards of a running job; the display and `state.json` show its `state`."""

    def __init__(
        self,
        shards: Iterable[Shard],
        committed_rows: Mapping[int, int],
        adapter_names: Mapping[str, str],
        before: JobState | None = None,
        known_lengths: Mapping[str, AnswerLengths] | None = MappingProxyType({}),
        num_reused: int = 0,
    ) -> None:
        """Begin with the parts that exist already. `committed_rows`: shard -> rows of its part; `num_reused` of all
        these rows are of earlier runs. `before`: state with their errors and tokens, and with the numbers of rows that
        were known to be done and reused. `known_lengths`: adapter -> lengths of its answers in earlier jobs, as the
        plan knew them; None when the plan knew all lengths exactly.
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
        # Rows that were done at the last sign of progress, and its time in seconds since the epoch.
        self._moved: tuple[int, float] | None = None
        uncommitted = [shard for shard in self._shards.values() if shard.shard_id not in committed_rows]
        self._left = WorkLeft(uncommitted, known_lengths)

    def unknown_outcome(self, shard_id: int, worker: str) -> ShardOutcome:
        """The outcome of a shard whose part exists although its worker is gone: rows only. The final count reads the
        part.
        """
        return ShardOutcome(shard_id, worker, self._shards[shard_id].num_rows, 0, 0, 0, 0)

    def committed(self, outcome: ShardOutcome) -> None:
        """Take in the outcome of a shard whose part is written."""
        self._outcomes[outcome.shard_id] = outcome
        if outcome.shard_id not in self._committed:
            self._left.committed(self._shards[outcome.shard_id])
        self._committed.add(outcome.shard_id)

    @property
    def batch_fill(self) -> float | None:
        """Share of places in batches that had rows while shards were queued, from 0 to 1; None when that time was too
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
        if not is_tail:
            self._fill.reported(report)
        self._reports[report.worker] = report
        for rows in report.finished:
            name = self.adapter_name(rows.adapter_id) if rows.adapter_id else ""
            self._left.lengths.finished(rows.output_tokens, rows.num_rows, name)

    def saw(self, workers: Iterable[str]) -> None:
        """Note that these workers are in the cluster."""
        self._worker_names.see(workers)

    def lost(self, worker: str) -> None:
        """Forget the report of a worker that is gone."""
        self._reports.pop(worker, None)

    def adapter_name(self, adapter_id: str) -> str:
        """Name of the adapter with a content hash; the beginning of the hash for an unknown adapter."""
        return self._names.get(adapter_id, adapter_id[:12])

    @property
    def reused_share(self) -> float:
        """Share of prompt tokens that engines reused instead of computing them: mean of the workers' last reports."""
        rates = [report.telemetry.prefix_hit_rate or 0.0 for report in self._reports.values()]
        return sum(rates) / len(rates) if rates else 0.0

    def work_left(self, num_places: int, done: Work | None = None) -> Work:
        """Work that is left for rows without an answer, less the part of running rows that engines have computed.
        `num_places`: rows that all engines together run at once. `done`: work that engines have done so far; None for
        nothing.
        """
        unfinished = self._unfinished()
        opened = [(self._shards[i], rows) for i, rows in unfinished.items() if i not in self._committed]
        telemetry = [report.telemetry for report in self._reports.values()]
        num_running, running_tokens = sum(t.num_running for t in telemetry), sum(t.running_tokens for t in telemetry)
        return self._left.now(num_places, done or Work(), opened, num_running, running_tokens)

    def state(self, now_s: float, left: TimeLeft | None = None) -> JobState:
        """The job's state at one time, while shards run. `now_s`: seconds since the epoch."""
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
            still_s=self._still_s(done, now_s),
        )

    def _still_s(self, rows_done: int, now_s: float) -> float:
        computes = any(report.tokens_per_s + report.prompt_tokens_per_s > 0 for report in self._reports.values())
        if self._moved is None or computes or rows_done != self._moved[0]:
            self._moved = rows_done, now_s
        return max(0.0, now_s - self._moved[1])

    def _rows_done(self) -> int:
        """Rows of committed shards and finished rows of open shards; never fewer than returned before. Finished rows of
        a lost worker are in its journals, and are found again when its shards are opened.
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
        """Open shard -> its rows without a result."""
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


class _Rows(NamedTuple):
    """Number of some rows, tokens of their prompts, and tokens that they are predicted to generate."""

    rows: float = 0.0
    prompt: float = 0.0
    predicted: float = 0.0

    @classmethod
    def sum(cls, counts: Iterable[Iterable[float]]) -> _Rows:
        """Sums of the counts of several groups of rows."""
        return cls(*(sum(column) for column in zip(cls(), *counts, strict=True)))


class WorkLeft:
    """Adds up the work of shards that are not committed, by the set of adapters of their rows. `known_lengths`: adapter
    -> lengths of its answers in earlier jobs; None when the plan knew all lengths exactly.
    """

    def __init__(
        self, shards: Iterable[Shard], known_lengths: Mapping[str, AnswerLengths] | None = MappingProxyType({})
    ) -> None:
        earlier = known_lengths or {}
        self._known = frozenset(earlier)
        #: Lengths of this run's answers so far.
        self.lengths = LengthEstimator()
        # Adapters -> rows, prompt tokens, predicted output tokens.
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        with_work = [shard for shard in shards if shard.has_engine_work]
        for shard in with_work:
            self._add(shard, 1.0)
        self._total = _Rows.sum(self._sums.values())
        # A shard names the adapters of its rows, not the number of rows of each.
        for adapters, counts in self._sums.items():
            share = counts[0] / self._total.rows / max(1, len(adapters))
            for name in self._known.intersection(adapters or ("",)):
                self.lengths.had(earlier[name], share)
        # Distribution of the lengths of answers when the plan knew all of them; else None.
        self._planned = (
            None
            if known_lengths is not None
            else LengthDistribution.of_groups(
                (s.num_rows, _predicted(s) / s.num_rows, max(1, s.longest_output_tokens)) for s in with_work
            )
        )

    def committed(self, shard: Shard) -> None:
        """Subtract the work of a shard whose part is written."""
        self._add(shard, -1.0)

    def _add(self, shard: Shard, share: float) -> None:
        if shard.has_engine_work:
            counts = self._sums[shard.adapters]
            for i, value in enumerate((shard.num_rows, shard.prompt_tokens, _predicted(shard))):
                counts[i] += share * value

    def now(
        self,
        num_places: int,
        done: Work,
        opened: Iterable[tuple[Shard, int]] = (),
        num_running: int = 0,
        running_tokens: int = 0,
    ) -> Work:
        """Work that is left, as `JobMonitor.work_left` returns it. `opened`: open shards and their numbers of rows
        without a result. `running_tokens`: tokens that running rows have generated.
        """
        groups = self._without_result(opened)
        num_rows, prompt, predicted = _Rows.sum(groups.values())
        if not num_rows:
            return Work()
        num_running = min(num_running, round(num_rows))
        num_waiting = max(0.0, num_rows - num_running)
        # Some running rows may still have prompt tokens to compute.
        prompt_left = min(prompt, max(prompt * num_waiting / num_rows, self._total.prompt - done.prompt_tokens))
        generated = running_tokens / max(1, num_running)
        waiting = num_waiting / num_rows
        if self._planned is None:
            most = predicted / num_rows / PRIOR_SHARE
            spread = self.lengths.distribution(num_running, generated, most, done.num_steps)
            whole, guessed = self._expected(groups, spread.left(), predicted / num_rows)
            output = whole * waiting + num_running * spread.left(generated)
            guessed *= output / whole
            num_steps = spread.steps_left(num_running, generated, num_waiting, num_places)
        else:
            output, guessed = self._known_left(num_rows, running_tokens), 0.0
            spread = self._planned
            num_steps = spread.steps_left(num_running, generated, num_waiting, num_places)
            # Waiting rows are shorter than others when the longest have begun first.
            num_steps *= output / (num_waiting * spread.left() + num_running * spread.left(generated))
        return Work(num_rows, prompt_left, output, guessed, num_steps)

    def _known_left(self, num_rows: float, running_tokens: int) -> float:
        """Tokens that are not generated yet, when all lengths are known. Finished rows that no report has counted were
        answered by an earlier run.
        """
        total, lengths = self._total, self.lengths
        num_before = max(0.0, total.rows - num_rows - lengths.num_finished)
        before = num_before * total.predicted / total.rows
        return max(num_rows, total.predicted - before - lengths.finished_tokens - running_tokens)

    def _without_result(self, opened: Iterable[tuple[Shard, int]]) -> dict[tuple[str, ...], _Rows]:
        """Rows without a result, by the set of adapters of their shards' rows."""
        done = WorkLeft(())
        for shard, rows_left in opened:
            done._add(shard, 1 - rows_left / shard.num_rows)
        groups = {}
        for adapters, counts in self._sums.items():
            left = _Rows(*(count - less for count, less in zip(counts, done._sums[adapters], strict=True)))
            if left.rows >= 0.5:
                groups[adapters] = left
        return groups

    def _expected(
        self, groups: Mapping[tuple[str, ...], _Rows], mean: float, predicted_mean: float
    ) -> tuple[float, float]:
        """Output tokens that these rows have in all, and the part of them that is a guess. `mean`: expected tokens of a
        row of any adapter; `predicted_mean`: the plan's prediction of it. Adapters differ as their finished rows do,
        else as predicted.
        """
        output = guessed = 0.0
        finished = self.lengths.finished_mean
        for adapters, (rows, _, predicted) in groups.items():
            measured = self.lengths.measured_together(adapters)
            if measured is not None and finished:
                output += rows * measured * mean / finished
            elif self._known.issuperset(adapters or ("",)):
                output += predicted
            else:
                output += predicted * mean / predicted_mean
                guessed += predicted * mean / predicted_mean * self.lengths.share_guessed
        return output, guessed


def _predicted(shard: Shard) -> int:
    """Predicted output tokens of a shard, at least one for each row: engines compute one even for an empty answer."""
    return max(shard.num_rows, shard.predicted_output_tokens)


class BatchFill:
    """Adds up used and offered places in batches since each worker had its first rows."""

    def __init__(self) -> None:
        # Worker -> (used, offered) place-seconds when it had its first rows, and as last reported.
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
        """Share of place-seconds in batches that rows had, from 0 to 1. None until `_LEAST_S` of one worker's batches
        were seen: in the first seconds prompts are computed.
        """
        used, offered = (sum(column) for column in zip((0.0, 0.0), *self._spans(), strict=True))
        return min(1.0, used / offered) if offered >= _LEAST_S * self._batch_rows else None

    def _spans(self) -> Iterator[tuple[float, float]]:
        for worker, (used, offered) in self._last.items():
            used_before, offered_before = self._first[worker]
            yield used - used_before, offered - offered_before
