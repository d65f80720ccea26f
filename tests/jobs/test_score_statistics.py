"""Intervals and paired comparisons of scores, against published tables, enumeration and simulated truth."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from lorabatch.jobs.score_statistics import best_of, by_row, common_scores, mean_interval, paired


def binary(num_rows: int, num_right: int) -> np.ndarray:
    return np.array([1.0] * num_right + [0.0] * (num_rows - num_right))


@pytest.mark.parametrize(
    ("num_rows", "num_right", "interval"),
    [
        (263, 81, (0.2553, 0.3662)),
        (148, 15, (0.0624, 0.1605)),
        (20, 0, (0.0, 0.1611)),
        (29, 1, (0.0061, 0.1718)),
        (20, 20, (0.8389, 1.0)),
    ],
)
def test_the_interval_of_a_share_is_wilson_s(num_rows: int, num_right: int, interval: tuple[float, float]) -> None:
    """The values of Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert mean_interval(binary(num_rows, num_right)) == pytest.approx(interval, abs=5e-5)


def test_the_interval_of_other_scores_is_of_standard_errors_and_within_bounds() -> None:
    scores = np.array([0.0, 0.5, 1.0, 0.5])
    error = 1.959964 * scores.std(ddof=1) / 2
    assert mean_interval(scores) == pytest.approx((0.5 - error, 0.5 + error), abs=1e-6)
    assert mean_interval(np.array([0.5])) == (0.0, 1.0)


def scores_of(both: int, better: int, worse: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two adapters whose rows fall into these four cells."""
    cells = [(1.0, 1.0)] * both + [(1.0, 0.0)] * better + [(0.0, 1.0)] * worse + [(0.0, 0.0)] * neither
    ours, others = (np.array(column) for column in zip(*cells, strict=True))
    return ours, others


@pytest.mark.parametrize("cells", [(40, 12, 3, 45), (0, 1, 0, 0), (5, 0, 0, 5), (1, 7, 7, 1), (700, 2, 13, 260)])
def test_a_paired_difference_has_mcnemar_s_p_value_and_the_interval_of_agresti_and_min(
    cells: tuple[int, int, int, int],
) -> None:
    _, better, worse, _ = cells
    found = paired(*scores_of(*cells))
    n = sum(cells)
    assert found["difference"] == pytest.approx((better - worse) / n)
    assert (found["num_rows"], found["num_better"], found["num_worse"]) == (n, better, worse)
    # every way in which the rows that differ could have fallen
    ways = [abs(2 * sum(way) - (better + worse)) for way in product((0, 1), repeat=better + worse)]
    assert found["p_value"] == pytest.approx(sum(way >= abs(better - worse) for way in ways) / len(ways))
    # Wald's interval of a table with half a row more in each cell
    b, c = (better + 0.5) / (n + 2), (worse + 0.5) / (n + 2)
    error = 1.959964 * math.sqrt((b + c - (b - c) ** 2) / (n + 2))
    assert found["interval"] == pytest.approx([max(-1, b - c - error), min(1, b - c + error)], abs=1e-6)


def test_many_discordant_rows_have_the_normal_p_value() -> None:
    found = paired(*scores_of(0, 1100, 1000, 0))
    tail = sum(math.comb(2100, count) for count in range(1001))
    assert found["p_value"] == pytest.approx(2 * tail / 2**2100, rel=0.01)


def test_intervals_of_binary_differences_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    cells, truth = (0.5, 0.12, 0.06, 0.32), 0.06
    held = 0
    for _ in range(600):
        low, high = paired(*scores_of(*rng.multinomial(150, cells)))["interval"]
        held += low <= truth <= high
    assert 0.93 <= held / 600 <= 0.98


def test_other_differences_have_a_bootstrap_interval_that_resampled_rows_have_too() -> None:
    rng = np.random.default_rng(0)
    ours, others = rng.choice([0, 0.25, 0.5, 1.0], 200), rng.choice([0, 0.5, 1.0], 200)
    found = paired(ours, others)
    means = (ours - others)[rng.integers(0, 200, (10_000, 200))].mean(axis=1)
    assert found["interval"] == pytest.approx(np.quantile(means, (0.025, 0.975)).tolist(), abs=0.005)
    assert paired(ours, others) == found, "the same rows have the same interval every time"
    assert paired(ours, ours)["interval"] == [0.0, 0.0]


def test_scores_are_joined_by_row_and_averaged_over_completions() -> None:
    keys, values = by_row(np.array([7, 3, 7, 9], np.uint64), np.array([1.0, 0.0, 0.0, 1.0]))
    assert (keys.tolist(), values.tolist()) == ([3, 7, 9], [0.0, 0.5, 1.0])
    common, ours, others = common_scores((keys, values), (np.array([1, 7, 9], np.uint64), np.array([0.0, 1.0, 0.0])))
    assert (common.tolist(), ours.tolist(), others.tolist()) == ([7, 9], [0.5, 1.0], [1.0, 0.0])


def test_the_best_of_equals_is_the_first_by_name() -> None:
    assert best_of({"b": 0.5, "a": 0.5, None: 0.4}) == "a"
    assert best_of({"b": 0.5, None: 0.5}) is None
