"""Statistics of scores: intervals of a mean, and paired comparison of adapters that have answered the same rows.

A row is the unit: the score of an adapter for a row is the mean over its completions of that row. All intervals are of
95 %. Shapes: arrays are `[num_rows]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Quantile of the normal distribution for intervals of 95 %.
_Z = 1.959963984540054
_RESAMPLES = 10_000
_SEED = 0
# Most discordant rows whose binomial probabilities are added up; the normal distribution serves for more.
_MOST_EXACT = 1000

Scores = NDArray[np.float64]


def mean_interval(scores: Scores) -> tuple[float, float]:
    """Interval of the mean. Scores of 0 and 1: Wilson's (E. B. Wilson, JASA 22, 1927, p. 209). Others: mean and
    1.96 standard errors, within 0 and 1.
    """
    num_rows, mean = len(scores), float(scores.mean())
    if _are_binary(scores):
        spread = _Z * math.sqrt(mean * (1 - mean) / num_rows + _Z**2 / (4 * num_rows**2))
        middle, scale = mean + _Z**2 / (2 * num_rows), 1 + _Z**2 / num_rows
        return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
    error = _Z * float(scores.std(ddof=1)) / math.sqrt(num_rows) if num_rows > 1 else 1.0
    return max(0.0, mean - error), min(1.0, mean + error)


def paired(scores: Scores, others: Scores) -> dict[str, Any]:
    """Comparison of two adapters on the same rows: `difference` of the means (`scores` less `others`), its `interval`,
    `p_value` of no difference, and `num_better` and `num_worse`, the rows where `scores` are higher and lower.

    Scores of 0 and 1, with b better and c worse rows of n: the interval of Agresti and Min (Statistics in Medicine 24,
    2005, p. 729), which adds half a row to each of the four cells: with b' = b + 1/2, c' = c + 1/2, n' = n + 2 it is
    (b' - c')/n' ± 1.96 sqrt(b' + c' - (b' - c')²/n')/n'; the p value is McNemar's exact one, of b or c rows, whichever
    are fewer, among b + c of equal chances, times two. Other scores: the percentile bootstrap of the rows' differences
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13), and a sign test of b and c.
    """
    differences = scores - others
    num_rows, better, worse = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    if _are_binary(scores) and _are_binary(others):
        b, c, n = better + 0.5, worse + 0.5, num_rows + 2
        middle, error = (b - c) / n, _Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
        interval = max(-1.0, middle - error), min(1.0, middle + error)
    else:
        interval = _bootstrap(differences)
    return {
        "num_rows": num_rows,
        "difference": float(differences.mean()),
        "interval": list(interval),
        "p_value": _sign_test(better, worse),
        "num_better": better,
        "num_worse": worse,
    }


def common_scores(
    first: tuple[NDArray[np.uint64], Scores], second: tuple[NDArray[np.uint64], Scores]
) -> tuple[NDArray[np.uint64], Scores, Scores]:
    """The rows that two adapters have scores for: their keys, and the scores of each adapter. Keys are unique."""
    keys, ours, others = np.intersect1d(first[0], second[0], assume_unique=True, return_indices=True)
    return keys, first[1][ours], second[1][others]


def by_row(keys: NDArray[np.uint64], scores: Scores) -> tuple[NDArray[np.uint64], Scores]:
    """The rows by rising key, each once, and the mean of each row's scores."""
    rows, row, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return rows, np.bincount(row, weights=scores, minlength=len(rows)) / counts


def best_of(means: Mapping[str | None, float]) -> str | None:
    """The adapter with the highest mean, of several the first by name; None is the base model."""
    return min(means, key=lambda name: (-means[name], name or ""))


def _are_binary(scores: Scores) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _bootstrap(differences: Scores) -> tuple[float, float]:
    """Percentile interval of the mean. Rows are drawn by the number of each different value, which takes less time."""
    values, counts = np.unique(differences, return_counts=True)
    rng = np.random.default_rng(_SEED)
    drawn = rng.multinomial(len(differences), counts / len(differences), size=_RESAMPLES)
    low, high = np.quantile(drawn @ values / len(differences), (0.025, 0.975))
    return float(low), float(high)


def _sign_test(better: int, worse: int) -> float:
    """Probability of counts at least as unequal when both are equally likely; 1 without any."""
    num_rows, fewer = better + worse, min(better, worse)
    if num_rows > _MOST_EXACT:
        return math.erfc((abs(better - worse) - 1) / math.sqrt(2 * num_rows)) if better != worse else 1.0
    tail = sum(math.comb(num_rows, count) for count in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**num_rows))
