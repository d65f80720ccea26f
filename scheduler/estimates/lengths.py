"""Estimates how many tokens rows will generate: a share of `max_tokens` until rows have finished, then their mean.

The planner, the cluster's scheduler, batchers and engines all take their estimates from here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Share of `max_tokens` that a row is expected to generate while nothing is known of its adapter.
PRIOR_SHARE = 0.5
#: Finished rows of an adapter from which their mean counts for more than what was planned.
MIN_FINISHED_ROWS = 8
# The prior counts like this many finished rows: the first rows to finish are short ones.
_PRIOR_ROWS = 16
# Bounds of length classes are powers of 2 ** (1 / _CLASSES_PER_OCTAVE).
_CLASSES_PER_OCTAVE = 4
_NUM_CLASSES = 1 + 24 * _CLASSES_PER_OCTAVE
# Rows of all lengths alike that are added to those that have finished, in a distribution of lengths.
_SPREAD_ROWS = 2.0
# Finished rows at which no other row is taken to be longer than halfway from the longest of them to `max_tokens`.
_FEW_ROWS = 32.0
# Rows of earlier jobs, in all, that say as much of answers as a guess.
_FEW_ANSWERS = 2.0
# Rows of the mean of all that are added to those of each class of prompts.
_CLASS_PRIOR_ROWS = 8
Integers = NDArray[np.integer[Any]]


def length_class(output_tokens: float) -> int:
    """Class of a row's length; lengths of one class differ by less than a fifth."""
    return min(_NUM_CLASSES - 1, int(_CLASSES_PER_OCTAVE * math.log2(max(1.0, output_tokens))))


def expected_tokens(max_tokens: NDArray[np.int32], share: float = PRIOR_SHARE) -> NDArray[np.float64]:
    """Expected output tokens of rows when nothing else is known, float64 `[num_rows]`; 0 where `max_tokens` is 0."""
    assert 0 < share <= 1, f"share={share}"
    return np.where(max_tokens > 0, np.maximum(1.0, share * max_tokens.astype(np.float64)), 0.0)


def tokens_to_hold(
    prompt_tokens: Integers, generated_tokens: Integers, max_tokens: Integers, expected: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Tokens for which rows take memory when they enter, where they may take more later, int64 `[num_rows]`.

    `expected`: tokens of whole answers. A row that has outlived its expectation is taken to generate half as much
    again. The last token of a row is never read back.
    """
    left = np.maximum(expected - generated_tokens, np.maximum(1.0, expected / 2))
    answer = np.minimum(generated_tokens + np.ceil(left).astype(np.int64), max_tokens)
    held: NDArray[np.int64] = np.maximum(1, prompt_tokens.astype(np.int64) + answer - 1)
    return held


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Lengths of the answers of earlier jobs."""

    #: By length class: rows that ended by themselves, rows that their `max_tokens` ended, and the output tokens of
    #: both.
    classes: Mapping[int, tuple[float, float, float]]

    @classmethod
    def of(cls, groups: Iterable[tuple[float, float, bool]]) -> AnswerLengths:
        """Make the lengths from groups of rows of about the same length.

        `groups`: (number of rows, their output tokens, whether `max_tokens` ended them) of each group.
        """
        return cls.joined(
            cls({length_class(tokens / rows): (rows * (not is_cut), rows * is_cut, tokens)})
            for rows, tokens, is_cut in groups
        )

    @property
    def num_rows(self) -> float:
        """Rows of all length classes together."""
        return sum(ended + cut for ended, cut, _ in self.classes.values())

    def to_json(self) -> list[tuple[float, ...]]:
        """JSON-ready form: the number of each class, followed by its counts."""
        return [(number, *counts) for number, counts in self.classes.items()]

    @classmethod
    def from_json(cls, raw: Iterable[Sequence[float]]) -> AnswerLengths:
        """The lengths that `to_json` wrote. Raises ValueError or TypeError when `raw` is not of that form."""
        classes: dict[int, tuple[float, float, float]] = {}
        for number, ended, cut, tokens in raw:
            in_order = number == int(number) and max(classes, default=-1) < number < _NUM_CLASSES
            if not (in_order and 0 < ended + cut < math.inf and min(ended, cut) >= 0 and 0 <= tokens < math.inf):
                raise ValueError(f"{[number, ended, cut, tokens]}: expected a class of lengths, its rows and tokens")
            classes[int(number)] = (float(ended), float(cut), float(tokens))
        if not classes:
            raise ValueError("no rows")
        return cls(classes)

    @classmethod
    def joined(cls, parts: Iterable[AnswerLengths]) -> AnswerLengths:
        """All rows together."""
        classes: defaultdict[int, tuple[float, float, float]] = defaultdict(lambda: _NO_ROWS)
        for part in parts:
            for number, counts in part.classes.items():
                classes[number] = _sum(classes[number], counts)
        return cls(dict(sorted(classes.items())))

    def scaled(self, share: float) -> AnswerLengths:
        """A share of all rows."""
        return AnswerLengths({number: (share * e, share * c, share * t) for number, (e, c, t) in self.classes.items()})

    def mean(self, limits: NDArray[np.int32]) -> NDArray[np.float64]:
        """Mean output tokens of rows with these `max_tokens`, float64, of the shape of `limits`."""
        tokens, shares = self._shares()
        longer = np.minimum(limits, np.maximum(tokens[-1], (tokens[-1] + limits) / 2))
        mean: NDArray[np.float64] = np.minimum(tokens, limits[..., None]) @ shares + (1 - shares.sum()) * longer
        return mean

    def at(self, quantile: NDArray[np.float64], limits: NDArray[np.int32]) -> NDArray[np.float64]:
        """Output tokens of rows with these `max_tokens` at these quantiles, both `[num_rows]`, not rounded."""
        tokens, shares = self._shares()
        ends = shares.cumsum()
        number = np.searchsorted(ends, quantile, side="right")
        beyond = np.clip((quantile - ends[-1]) / max(1 - ends[-1], 1e-9), 0, 1)
        longer = tokens[-1] + beyond * np.maximum(0, limits - tokens[-1])
        return np.where(number < len(tokens), tokens[np.minimum(number, len(tokens) - 1)], longer)

    def _shares(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lengths, ascending, and the shares of rows that end there by themselves, both float64 `[num_lengths]`.

        Kaplan-Meier: a row that was cut counts among those that might have ended. The rows that the shares leave to 1
        are longer than all these lengths: any length up to `max_tokens` alike.
        """
        ended, cut, tokens = np.array(list(self.classes.values())).T
        at_risk = (ended + cut)[::-1].cumsum()[::-1]
        longer = np.cumprod(1 - ended / at_risk)
        return tokens / (ended + cut), -np.diff(longer, prepend=1.0)


_NO_ROWS = (0.0, 0.0, 0.0)


def _sum(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


#: Adapter's id (None: base model) and hash of a task, by which lengths of answers are known.
AnswerKey = tuple[str | None, int]
#: The task of all rows of an adapter that belong to none of its `MOST_TASKS` tasks with the most rows.
OTHER_TASKS = 0
#: Tasks of an adapter whose lengths are kept apart: rows may each have a system message of their own.
MOST_TASKS = 64


def frequent_tasks(rows_of_task: Mapping[int, float]) -> set[int]:
    """The tasks of an adapter whose lengths are kept apart, those with the most rows."""
    ordered = sorted(rows_of_task, key=lambda task: (-rows_of_task[task], task))
    return set(ordered[:MOST_TASKS])


def lengths_by_adapter(
    known: Mapping[AnswerKey, AnswerLengths], rows: Mapping[AnswerKey, int]
) -> dict[str | None, AnswerLengths]:
    """Lengths of each adapter's answers in earlier jobs, its tasks weighted as in this job. `rows`: rows of this job by
    adapter and task. An adapter without a known task is left out.
    """
    parts: defaultdict[str | None, list[AnswerLengths]] = defaultdict(list)
    of_adapter: defaultdict[str | None, dict[int, float]] = defaultdict(dict)
    for (adapter_id, task), count in rows.items():
        of_adapter[adapter_id][task] = count
    for adapter_id, tasks in of_adapter.items():
        frequent, whole = frequent_tasks(tasks), sum(tasks.values())
        for task, num_rows in tasks.items():
            lengths = known.get((adapter_id, task if task in frequent else OTHER_TASKS))
            if lengths is not None:
                parts[adapter_id].append(lengths.scaled(num_rows / whole))
    return {adapter_id: AnswerLengths.joined(found) for adapter_id, found in parts.items()}


class AnswerModel:
    """Expected lengths of a job's answers, before it runs.

    An answer may have any length around a share of `max_tokens` alike or, when earlier jobs have had its group, a
    length as in those. A group is the rows of one adapter and one task. A few rows of all groups that earlier jobs have
    had are added to a group's own.
    """

    def __init__(self, length_share: float, earlier: Sequence[AnswerLengths | None]) -> None:
        """`earlier`: lengths of each group in earlier jobs; None for one without any."""
        self._length_share = length_share
        had = [lengths for lengths in earlier if lengths is not None]
        num_rows = sum(lengths.num_rows for lengths in had)
        # Share of answers that may have any length although earlier jobs have had their group.
        self._guessed = (_FEW_ANSWERS / (_FEW_ANSWERS + num_rows)) ** 2
        pooled = AnswerLengths.joined(had).scaled(_PRIOR_ROWS / max(1.0, num_rows))
        self._earlier = [None if lengths is None else AnswerLengths.joined([lengths, pooled]) for lengths in earlier]

    def mean(self, max_tokens: NDArray[np.int32], group: Integers) -> NDArray[np.float64]:
        """Expected output tokens, float64 `[num_rows]`; 0 where `max_tokens` is 0. `group`: an index into `earlier`."""
        mean = expected_tokens(max_tokens, self._length_share)
        for rows, lengths in self._known(max_tokens, group):
            limits, number = np.unique(max_tokens[rows], return_inverse=True)
            of_earlier = lengths.mean(limits)[number]
            mean[rows] = np.maximum(1.0, self._guessed * mean[rows] + (1 - self._guessed) * of_earlier)
        return mean

    def drawn(self, max_tokens: NDArray[np.int32], group: Integers, quantile: NDArray[np.float64]) -> NDArray[np.int32]:
        """Output tokens, int32 `[num_rows]`, at these quantiles of what is expected, from 0 to below 1."""
        expected = expected_tokens(max_tokens, self._length_share)
        around, place = np.minimum(expected, max_tokens - expected), quantile.copy()
        known = list(self._known(max_tokens, group))
        for rows, _ in known:
            place[rows] /= self._guessed
        drawn = np.ceil(expected + around * (2 * place - 1))
        for rows, lengths in known:
            later = rows[place[rows] >= 1]
            at = (quantile[later] - self._guessed) / (1 - self._guessed)
            drawn[later] = np.rint(lengths.at(at, max_tokens[later]))
        return np.clip(drawn, np.minimum(1, max_tokens), max_tokens).astype(np.int32)

    def _known(
        self, max_tokens: NDArray[np.int32], group: Integers
    ) -> Iterator[tuple[NDArray[np.int64], AnswerLengths]]:
        """Rows of each group that earlier jobs have had, but for those that ask for nothing."""
        if not any(self._earlier):
            return
        order = np.argsort(group, kind="stable")
        ends = np.bincount(group, minlength=len(self._earlier)).cumsum()
        for lengths, rows in zip(self._earlier, np.split(order, ends[:-1]), strict=True):
            if lengths is not None and len(rows):
                yield rows[max_tokens[rows] > 0], lengths


def spread_quantiles(places: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each place, float64, of the shape of `places`. Places side by side, and those at
    equal distances, have numbers that are spread evenly: they are multiples of the golden ratio.
    """
    multiples = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (multiples >> np.uint64(11)).astype(np.float64) / 2.0**53


class LengthEstimator:
    """Mean output tokens of rows, by adapter and over all. An adapter is known by its id, None is the base model."""

    def __init__(self) -> None:
        self._asked_rows = self._asked_tokens = self._prompt_tokens = self._reused_tokens = 0
        #: Rows of any adapter that have finished, and their output tokens.
        self.num_finished = self.finished_tokens = 0
        # Adapter -> rows finished so far and their output tokens.
        self._finished: dict[str | None, tuple[int, int]] = {}
        # By length class: rows of any adapter that have finished, and their output tokens.
        self._rows = np.zeros(_NUM_CLASSES)
        self._tokens = np.zeros(_NUM_CLASSES)
        # By length class: rows of earlier jobs, scaled to a few (`had`).
        self._earlier_rows = np.zeros(_NUM_CLASSES)

    @classmethod
    def of_rows(cls, max_tokens: Integers, prompt_tokens: Integers) -> LengthEstimator:
        """An estimator for rows of which none has finished; both `[num_rows]`."""
        lengths = cls()
        lengths.asked(int(max_tokens.sum()), len(max_tokens), int(prompt_tokens.sum()))
        return lengths

    def asked(self, max_tokens: int, num_rows: int = 1, prompt_tokens: int = 0) -> None:
        """Take in rows to be run. `max_tokens`, `prompt_tokens`: sums over all of them."""
        self._asked_rows += num_rows
        self._asked_tokens += max_tokens
        self._prompt_tokens += prompt_tokens

    def finished(
        self, output_tokens: int, num_rows: int = 1, adapter_id: str | None = None, reused_tokens: int = 0
    ) -> None:
        """Take in finished rows of one adapter and about the same length.

        `output_tokens`: sum of the tokens that they have generated. `reused_tokens`: sum of their prompt tokens that
        another row had computed.
        """
        self._reused_tokens += reused_tokens
        if num_rows:
            number = length_class(output_tokens / num_rows)
            self._rows[number] += num_rows
            self._tokens[number] += output_tokens
        self.num_finished += num_rows
        self.finished_tokens += output_tokens
        rows, tokens = self._finished.get(adapter_id, (0, 0))
        self._finished[adapter_id] = (rows + num_rows, tokens + output_tokens)

    def had(self, earlier: AnswerLengths, share: float) -> None:
        """Take in the lengths of an adapter's answers in earlier jobs, for `distribution`.

        `share`: the adapter's rows, as a share of all rows.
        """
        for number, (ended, cut, _) in earlier.classes.items():
            self._earlier_rows[number] += share * _PRIOR_ROWS * (ended + cut) / earlier.num_rows

    def mean(self) -> float:
        """Expected output tokens of a row of any adapter; 1 before any row was asked for."""
        prior = self._asked_tokens / self._asked_rows * PRIOR_SHARE if self._asked_rows else 1.0
        return (_PRIOR_ROWS * prior + self.finished_tokens) / (_PRIOR_ROWS + self.num_finished)

    @property
    def mean_prompt(self) -> float:
        """Prompt tokens of a row of any adapter that no other row computes for it; 0 before any row was asked for."""
        reused = self._reused_tokens / max(1, self.num_finished)
        return max(0.0, self._prompt_tokens / max(1, self._asked_rows) - reused)

    def measured(self, adapter_id: str | None) -> float | None:
        """Mean output tokens of an adapter's finished rows; None while there are fewer than `MIN_FINISHED_ROWS`."""
        rows, tokens = self._finished.get(adapter_id, (0, 0))
        return tokens / rows if rows >= MIN_FINISHED_ROWS else None

    def rows_finished(self, adapter_id: str | None) -> int:
        """Finished rows of an adapter."""
        return self._finished.get(adapter_id, (0, 0))[0]

    def measured_together(self, adapters: Sequence[str]) -> float | None:
        """Mean of the measured lengths of these adapters (none: of the base model); None while there is none."""
        means = [mean for adapter_id in adapters or (None,) if (mean := self.measured(adapter_id)) is not None]
        return sum(means) / len(means) if means else None

    @property
    def finished_mean(self) -> float:
        """Output tokens of a finished row of any adapter; 0 before the first."""
        return self.finished_tokens / max(1, self.num_finished)

    @property
    def share_guessed(self) -> float:
        """Weight of a guess beside the lengths of finished rows, from 1 (none has finished) down to 0."""
        return _SPREAD_ROWS / (_SPREAD_ROWS + self.num_finished)

    def distribution(
        self, num_running: int, generated_tokens: float, max_tokens: float, num_steps: float = math.inf
    ) -> LengthDistribution:
        """Distribution of the lengths of rows of any adapter.

        `num_running`: rows that have generated `generated_tokens` each so far, on average, and `num_steps` at most.
        `max_tokens`: most tokens that a row may generate; raised where rows have generated more.
        """
        finished = self._rows + self._earlier_rows
        longest = 2.0 ** ((np.flatnonzero(finished).max(initial=0) + 1) / _CLASSES_PER_OCTAVE)
        # The more rows have finished, the less likely one is much longer than all of them.
        limit = longest + max(0.0, max_tokens - longest) * _FEW_ROWS / (_FEW_ROWS + finished.sum())
        oldest = max(generated_tokens, min(2 * generated_tokens, num_steps))
        ages = (2 * generated_tokens - oldest, oldest)
        return LengthDistribution.of(finished, num_running, ages, max(limit, 1.2 * oldest))

    def left(self, generated_tokens: float, max_tokens: float) -> float:
        """Expected tokens that a row still has to generate after its first `generated_tokens`, E[L - t | L > t].

        A few rows of any length up to `max_tokens` are added to those that have finished, because short rows finish
        first. The longer a row has run, the longer it runs on, where lengths are long-tailed.
        """
        number = length_class(generated_tokens)
        rows = self._rows[number + 1 :].sum() + self._rows[number] / 2
        tokens = self._tokens[number + 1 :].sum() + self._tokens[number] / 2
        prior_rows = _PRIOR_ROWS * max(0.0, 1 - generated_tokens / max(1.0, max_tokens))
        tokens += prior_rows * (generated_tokens + max_tokens) / 2
        rows += prior_rows
        return max(1.0, float(tokens / rows - generated_tokens)) if rows else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Share of rows that generate more than a given number of tokens.

    It is the Kaplan-Meier estimator (Nonparametric Estimation from Incomplete Observations, 1958), in which rows that
    still run count as long as they have run. Short rows finish first, so that the mean of finished rows alone is too
    small.
    """

    #: Lengths, float64 `[num_points]`, ascending from 0.
    tokens: NDArray[np.float64]
    #: Share of rows above each length, float64 `[num_points]`, from 1 down to 0, linear in between.
    share_above: NDArray[np.float64]

    @classmethod
    def of(
        cls, finished: NDArray[np.float64], num_running: int, ages: tuple[float, float], max_tokens: float
    ) -> LengthDistribution:
        """Estimate the distribution from finished rows by length class, and running ones.

        `ages`: least and most tokens that running rows have generated; they are taken to be spread evenly in between.
        Two rows of any length up to `max_tokens` alike are added; no row is longer than that.
        """
        ends = np.minimum(2.0 ** (np.arange(1, _NUM_CLASSES + 1) / _CLASSES_PER_OCTAVE), max_tokens)
        starts = np.concatenate([[0.0], ends[:-1]])
        middle = (starts + ends) / 2
        is_running = np.clip((ages[1] - middle) / max(ages[1] - ages[0], 1.0), 0, 1)
        ended = finished + _SPREAD_ROWS * (ends - starts) / max_tokens
        at_risk = ended[::-1].cumsum()[::-1] + num_running * is_running
        stays = 1 - np.divide(ended, at_risk, out=np.ones_like(ended), where=at_risk > 0)
        share_above = np.cumprod(stays) * (ends < max_tokens)
        return cls(np.concatenate([[0.0], ends]), np.concatenate([[1.0], share_above]))

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[float, float, float]]) -> LengthDistribution:
        """Guess the distribution from groups of rows: the number, mean length and longest length of each.

        A share of (1 - x / longest) ** (longest / mean - 1) of a group's rows is taken to be longer than x; its mean is
        the group's.
        """
        # Without groups: one row of one token.
        num_rows, mean, longest = np.array(list(groups) or [(1.0, 1.0, 1.0)]).T
        mean = np.maximum(mean, 1.0)
        longest = np.maximum(longest, mean)
        tokens = np.minimum(2.0 ** (np.arange(_NUM_CLASSES) / _CLASSES_PER_OCTAVE), longest.max())
        tokens = np.concatenate([[0.0], tokens])
        rest = np.clip(1 - tokens[:, None] / longest, 0, 1)
        shares = np.where(rest > 0, rest ** (longest / mean - 1), 0.0)
        return cls(tokens, shares @ num_rows / num_rows.sum())

    def left(self, generated_tokens: float = 0.0) -> float:
        """Expected tokens that a row generates after its first `generated_tokens`, E[L - t | L > t]; at least 1."""
        share = self._above(generated_tokens)
        if share <= 0:
            return 1.0
        is_later = self.tokens > generated_tokens
        tokens = np.concatenate([[generated_tokens], self.tokens[is_later]])
        shares = np.concatenate([[share], self.share_above[is_later]])
        return max(1.0, float(_areas(tokens, shares).sum()) / share)

    def steps_left(self, num_running: float, generated_tokens: float, num_waiting: float, num_places: float) -> float:
        """Forward passes until the last of these rows has ended: the number after which half a row is expected to end.

        `generated_tokens`: tokens of each running row so far. Waiting rows begin one after the other while all
        `num_places` are taken, evenly until the last one begins.
        """
        left = self.left(generated_tokens)
        tokens = num_running * left + num_waiting * self.left()
        last_begins = max(0.0, tokens / num_places - left) if num_running + num_waiting > num_places else 0.0
        running = num_running / max(self._above(generated_tokens), 1e-9)
        sums = np.concatenate([[0.0], _areas(self.tokens, self.share_above).cumsum()])

        def later(steps: float) -> float:
            """Rows that are expected to end after `steps` passes."""
            began = np.interp([steps - last_begins, steps], self.tokens, sums)
            # A row that has not begun has not ended.
            not_begun = max(0.0, last_begins - steps)
            waiting = self._above(steps) if not last_begins else (not_begun + began[1] - began[0]) / last_begins
            return running * self._above(generated_tokens + steps) + num_waiting * float(waiting)

        low, high = 0.0, last_begins + float(self.tokens[-1])
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if later(middle) > 0.5 else (low, middle)
        return max(1.0, high)

    def _above(self, tokens: float) -> float:
        return float(np.interp(tokens, self.tokens, self.share_above))


def _areas(tokens: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area under the line between each two neighbouring points."""
    return (shares[1:] + shares[:-1]) / 2 * np.diff(tokens)


class LengthsByPrompt:
    """Expected output tokens of rows by the length of their prompts, learned from the rows that one engine finishes.

    In a trace of conversations the length of a prompt explains 72 % of the variance of the answers' lengths, and not by
    any simple curve; hence classes, a quarter of an octave wide. Rows that still run add what they have generated so
    far to the mean of their class. A few rows of the mean of all classes are added to each class.
    """

    def __init__(self) -> None:
        self._rows = np.zeros(_NUM_CLASSES)
        self._tokens = np.zeros(_NUM_CLASSES)

    def finished(self, prompt_tokens: Integers, output_tokens: Integers) -> None:
        """Take in finished rows; both `[num_rows]`."""
        number = _classes(prompt_tokens)
        np.add.at(self._rows, number, 1)
        np.add.at(self._tokens, number, output_tokens)

    def expected(
        self,
        prompt_tokens: Integers,
        max_tokens: Integers,
        running_prompt: Integers,
        running_tokens: Integers,
    ) -> NDArray[np.float64] | None:
        """Expected output tokens of rows with these prompts and limits, float64 `[num_rows]`; None before any row has
        finished.

        `running_prompt`, `running_tokens`: prompt tokens and generated tokens of each running row, `[num_running]`.
        """
        num_finished = self._rows.sum()
        if not num_finished:
            return None
        tokens = self._tokens.copy()
        np.add.at(tokens, _classes(running_prompt), running_tokens)
        mean = tokens.sum() / num_finished
        by_class = (tokens + _CLASS_PRIOR_ROWS * mean) / (self._rows + _CLASS_PRIOR_ROWS)
        expected: NDArray[np.float64] = np.clip(by_class[_classes(prompt_tokens)], 1.0, np.maximum(max_tokens, 1))
        return expected


def _classes(prompt_tokens: Integers) -> NDArray[np.int64]:
    octaves = np.log2(np.maximum(1, prompt_tokens))
    return np.minimum(_NUM_CLASSES - 1, (_CLASSES_PER_OCTAVE * octaves).astype(np.int64))
