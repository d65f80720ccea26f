"""How much each adapter will ask for: output lengths (unknown until rows finish) and tokens per second
(online).

Lengths are kept as histograms over geometric buckets, one per adapter and one over all. A prediction is a
quantile of the adapter's histogram, filled up with `prior_rows` rows of the overall one, so that an adapter
without finished rows starts from what the others showed, and all start from a share of `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .workload import Workload

_BUCKETS_PER_DOUBLING = 4
_NUM_BUCKETS = 20 * _BUCKETS_PER_DOUBLING


class LengthModel:
    """Predicted output tokens per adapter, corrected as rows finish.

    `adapter_names`: in the workload's order; the name "" stands for the base model. `prior_share`: before any
    row has finished, a row is expected to use this share of its `max_tokens`.
    """

    def __init__(self, adapter_names: Sequence[str], *, prior_share: float = 0.5, prior_rows: float = 8.0) -> None:
        assert 0 < prior_share <= 1, f"prior_share={prior_share}"
        self._slot = {name: i for i, name in enumerate(adapter_names)}
        self._slot[""] = len(adapter_names)
        self._histogram = np.zeros((len(adapter_names) + 1, _NUM_BUCKETS))
        self._prior_share = prior_share
        self._prior_rows = prior_rows

    @property
    def num_finished(self) -> int:
        """Rows learned from."""
        return int(self._histogram.sum())

    def observe(self, finished: Iterable[tuple[str, int, int]]) -> None:
        """Learn from `Progress.finished`: (adapter name, rows, their output tokens). Unknown names are
        ignored.
        """
        for name, num_rows, output_tokens in finished:
            slot = self._slot.get(name)
            if slot is not None and num_rows > 0:
                self._histogram[slot, _bucket(output_tokens / num_rows)] += num_rows

    def quantiles(self, quantile: float) -> NDArray[np.float64]:
        """`[num_adapters + 1]`: that quantile of each adapter's lengths, the base model last; NaN when
        unknown.
        """
        total = self._histogram.sum(axis=0)
        if not total.any():
            return np.full(len(self._histogram), np.nan)
        blended = self._histogram + self._prior_rows * total / total.sum()
        below = np.cumsum(blended, axis=1)
        bucket = (below < quantile * below[:, -1:]).sum(axis=1)
        return _middle(np.minimum(bucket, _NUM_BUCKETS - 1))

    def predict(self, workload: Workload, quantile: float = 0.5) -> NDArray[np.float64]:
        """Output tokens of each row, float64 `[num_rows]`, never above its `max_tokens`."""
        limit = workload.max_tokens.astype(np.float64)
        of_adapter = self.quantiles(quantile)[workload.adapter_index % len(self._histogram)]
        return np.where(np.isnan(of_adapter), self._prior_share * limit, np.minimum(of_adapter, limit))


def _bucket(output_tokens: float) -> int:
    return min(_NUM_BUCKETS - 1, int(_BUCKETS_PER_DOUBLING * np.log2(max(output_tokens, 1.0))))


def _middle(bucket: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(2.0 ** ((bucket + 0.5) / _BUCKETS_PER_DOUBLING))


def extrapolate(history: ArrayLike) -> NDArray[np.float64]:
    """Next time step's tokens per second of each adapter (LoRAServe Algorithm 1, step 1).

    `history` `[num_steps, num_adapters]`, oldest first. A straight line through the last steps (at most
    four), never below zero. One step repeats; none is refused.
    """
    seen = np.atleast_2d(np.asarray(history, dtype=np.float64))[-4:]
    assert len(seen) >= 1, "history holds no time step"
    if len(seen) == 1:
        return np.asarray(seen[0].copy())
    steps = np.arange(len(seen)) - (len(seen) - 1) / 2
    slope = steps @ (seen - seen.mean(axis=0)) / (steps @ steps)
    return np.asarray(np.maximum(0.0, seen.mean(axis=0) + slope * (steps[-1] + 1)))
