"""Estimates the work that is left of a running job, from its plan and from what its engines report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..planning.waves import Shard
from .lengths import PRIOR_SHARE, AnswerLengths, LengthDistribution, LengthEstimator
from .time_left import Work

# Finished rows of an adapter, as a multiple of its rows in the canary, from which on their mean counts instead.
_CANARY_COUNTS = 12


class WorkLeft:
    """Adds up the work of shards that are not committed, by the set of adapters of their rows.

    `known_lengths`: adapter id (None: base model) -> lengths of its answers in earlier jobs; None when the plan knew
    all lengths exactly. `lengths`: lengths of this run's answers, fed by its owner; those of earlier jobs are added.
    `canary_rows`: adapter id -> rows of the canary by whose answers the shards are predicted.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        known_lengths: Mapping[str | None, AnswerLengths] | None,
        lengths: LengthEstimator,
        canary_rows: Mapping[str | None, int] | None = None,
    ) -> None:
        earlier = known_lengths or {}
        self._known = frozenset(earlier)
        self._canary_rows = canary_rows or {}
        self._lengths = lengths
        # Set of adapters -> planned work of the shards whose rows have these adapters.
        self._planned: defaultdict[tuple[str, ...], Work] = defaultdict(Work)
        with_work = [shard for shard in shards if shard.has_engine_work]
        for shard in with_work:
            self._planned[shard.adapters] += _work_of(shard)
        self._total = sum(self._planned.values(), Work())
        # A shard names the adapters of its rows, not the number of rows of each.
        for adapters, work in self._planned.items():
            share = work.num_rows / self._total.num_rows / max(1, len(adapters))
            for adapter_id in self._known.intersection(adapters or (None,)):
                lengths.had(earlier[adapter_id], share)
        # Distribution of the lengths of answers when the plan knew all of them; else None.
        self._spread = (
            None
            if known_lengths is not None
            else LengthDistribution.of_groups(
                (s.num_rows, _work_of(s).output_tokens / s.num_rows, max(1, s.longest_output_tokens)) for s in with_work
            )
        )

    def committed(self, shard: Shard) -> None:
        """Subtract the work of a shard whose part is written."""
        if shard.has_engine_work:
            self._planned[shard.adapters] += _work_of(shard, -1.0)

    def now(
        self,
        num_places: int,
        done: Work,
        opened: Iterable[tuple[Shard, int]] = (),
        num_running: int = 0,
        running_tokens: int = 0,
    ) -> Work:
        """Work that is left for rows without a result, less the part of running rows that engines have computed.

        `num_places`: rows that all engines together run at once. `done`: work that engines have done so far. `opened`:
        open shards and their numbers of rows without a result. `running_tokens`: tokens that running rows have
        generated.
        """
        groups = self._without_result(opened)
        whole = sum(groups.values(), Work())
        num_rows, prompt, predicted = whole.num_rows, whole.prompt_tokens, whole.output_tokens
        if not num_rows:
            return Work()
        num_running = min(num_running, round(num_rows))
        num_waiting = max(0.0, num_rows - num_running)
        # Some running rows may still have prompt tokens to compute.
        prompt_left = min(prompt, max(prompt * num_waiting / num_rows, self._total.prompt_tokens - done.prompt_tokens))
        generated = running_tokens / max(1, num_running)
        waiting = num_waiting / num_rows
        if self._spread is None:
            most = predicted / num_rows / PRIOR_SHARE
            spread = self._lengths.distribution(num_running, generated, most, done.num_steps)
            expected, guessed = self._expected(groups, spread.left(), predicted / num_rows)
            output = expected * waiting + num_running * spread.left(generated)
            guessed *= output / expected
            num_steps = spread.steps_left(num_running, generated, num_waiting, num_places)
            if self._canary_rows:
                num_steps *= output / (num_waiting * spread.left() + num_running * spread.left(generated))
        else:
            output, guessed = self._known_left(num_rows, running_tokens), 0.0
            spread = self._spread
            num_steps = spread.steps_left(num_running, generated, num_waiting, num_places)
            # Waiting rows are shorter than others when the longest have begun first.
            num_steps *= output / (num_waiting * spread.left() + num_running * spread.left(generated))
        return Work(num_rows, prompt_left, output, guessed, num_steps)

    def _known_left(self, num_rows: float, running_tokens: int) -> float:
        """Tokens that are not generated yet, when all lengths are known. Finished rows that no report has counted were
        answered by an earlier run.
        """
        total, lengths = self._total, self._lengths
        num_before = max(0.0, total.num_rows - num_rows - lengths.num_finished)
        before = num_before * total.output_tokens / total.num_rows
        return max(num_rows, total.output_tokens - before - lengths.finished_tokens - running_tokens)

    def _without_result(self, opened: Iterable[tuple[Shard, int]]) -> dict[tuple[str, ...], Work]:
        """Planned work of rows without a result, by the set of adapters of their shards' rows."""
        left = self._planned.copy()
        for shard, rows_left in opened:
            if shard.has_engine_work:
                left[shard.adapters] += _work_of(shard, rows_left / shard.num_rows - 1)
        return {adapters: work for adapters, work in left.items() if work.num_rows >= 0.5}

    def _expected(
        self, groups: Mapping[tuple[str, ...], Work], mean: float, predicted_mean: float
    ) -> tuple[float, float]:
        """Output tokens that these rows have in all, and the part of them that is a guess. `mean`: expected tokens of a
        row of any adapter; `predicted_mean`: the plan's prediction of it. Adapters differ as their finished rows do,
        else as predicted.
        """
        output = guessed = 0.0
        finished = self._lengths.finished_mean
        for adapters, work in groups.items():
            predicted = work.output_tokens
            measured = self._lengths.measured_together(adapters)
            if self._canary_rows.keys() >= set(adapters or (None,)):
                output += self._by_canary(adapters, work)
            elif measured is not None and finished:
                output += work.num_rows * measured * mean / finished
            elif self._known.issuperset(adapters or (None,)):
                output += predicted
            else:
                output += predicted * mean / predicted_mean
                guessed += predicted * mean / predicted_mean * self._lengths.share_guessed
        return output, guessed

    def _by_canary(self, adapters: tuple[str, ...], work: Work) -> float:
        """Output tokens that rows of these adapters have in all: as the canary's, all of which have finished. Of the
        other rows the short ones finish first, so that they say more only when they are many times the canary's.
        """
        ids = adapters or (None,)
        are_many = all(
            self._lengths.rows_finished(adapter_id) >= _CANARY_COUNTS * self._canary_rows[adapter_id]
            for adapter_id in ids
        )
        measured = self._lengths.measured_together(adapters) if are_many else None
        return work.output_tokens if measured is None else work.num_rows * measured


def _work_of(shard: Shard, share: float = 1.0) -> Work:
    """Planned work of a shard's rows, times `share`. Each row counts at least one token, since engines compute one even
    for an empty answer.
    """
    output_tokens = max(shard.num_rows, shard.predicted_output_tokens)
    return Work(share * shard.num_rows, share * shard.prompt_tokens, share * output_tokens)
