"""Adds up the work that is left of a running job, from its shards without a part and the lengths of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..planning.waves import Shard
from .lengths import PRIOR_SHARE, AnswerLengths, LengthDistribution, LengthEstimator
from .time_left import Work


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
    """Adds up the work of shards that are not committed, by the set of adapters of their rows.

    `known_lengths`: adapter -> lengths of its answers in earlier jobs; None when the plan knew all lengths exactly.
    `lengths`: lengths of this run's answers, fed by its owner; those of earlier jobs are added to it.
    """

    def __init__(
        self, shards: Iterable[Shard], known_lengths: Mapping[str, AnswerLengths] | None, lengths: LengthEstimator
    ) -> None:
        earlier = known_lengths or {}
        self._known = frozenset(earlier)
        self._lengths = lengths
        # Adapters -> rows, prompt tokens, predicted output tokens.
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        with_work = [shard for shard in shards if shard.has_engine_work]
        for shard in with_work:
            _add(self._sums, shard, 1.0)
        self._total = _Rows.sum(self._sums.values())
        # A shard names the adapters of its rows, not the number of rows of each.
        for adapters, counts in self._sums.items():
            share = counts[0] / self._total.rows / max(1, len(adapters))
            for name in self._known.intersection(adapters or ("",)):
                lengths.had(earlier[name], share)
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
        _add(self._sums, shard, -1.0)

    def now(
        self,
        num_places: int,
        done: Work,
        opened: Iterable[tuple[Shard, int]] = (),
        num_running: int = 0,
        running_tokens: int = 0,
    ) -> Work:
        """Work that is left for rows without an answer, less the part of running rows that engines have computed.

        `num_places`: rows that all engines together run at once. `done`: work that engines have done so far. `opened`:
        open shards and their numbers of rows without a result. `running_tokens`: tokens that running rows have
        generated.
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
            spread = self._lengths.distribution(num_running, generated, most, done.num_steps)
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
        total, lengths = self._total, self._lengths
        num_before = max(0.0, total.rows - num_rows - lengths.num_finished)
        before = num_before * total.predicted / total.rows
        return max(num_rows, total.predicted - before - lengths.finished_tokens - running_tokens)

    def _without_result(self, opened: Iterable[tuple[Shard, int]]) -> dict[tuple[str, ...], _Rows]:
        """Rows without a result, by the set of adapters of their shards' rows."""
        done: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for shard, rows_left in opened:
            _add(done, shard, 1 - rows_left / shard.num_rows)
        groups = {}
        for adapters, counts in self._sums.items():
            left = _Rows(*(count - less for count, less in zip(counts, done.get(adapters, _Rows()), strict=True)))
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
        finished = self._lengths.finished_mean
        for adapters, (rows, _, predicted) in groups.items():
            measured = self._lengths.measured_together(adapters)
            if measured is not None and finished:
                output += rows * measured * mean / finished
            elif self._known.issuperset(adapters or ("",)):
                output += predicted
            else:
                output += predicted * mean / predicted_mean
                guessed += predicted * mean / predicted_mean * self._lengths.share_guessed
        return output, guessed


def _add(sums: dict[tuple[str, ...], list[float]], shard: Shard, share: float) -> None:
    """Add a share of a shard's rows, prompt tokens and predicted output tokens to the sums of its adapters."""
    if shard.has_engine_work:
        counts = sums[shard.adapters]
        for i, value in enumerate((shard.num_rows, shard.prompt_tokens, _predicted(shard))):
            counts[i] += share * value


def _predicted(shard: Shard) -> int:
    """Predicted output tokens of a shard, at least one for each row: engines compute one even for an empty answer."""
    return max(shard.num_rows, shard.predicted_output_tokens)
