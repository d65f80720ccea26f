"""Draws of the papers' experiments, from a seed: popularities of adapters, and arrivals of requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def top_five_popularity(num_adapters: int, share: float = 0.7) -> NDArray[np.float64]:
    """Popularity in which five adapters carry `share` of the requests (LoRAServe figure 8), the others the rest."""
    top = min(5, num_adapters)
    weight = np.full(num_adapters, (1.0 - share) / max(1, num_adapters - top))
    weight[:top] = share / top
    return np.asarray(weight / weight.sum())


def draw_shifting(
    generator: np.random.Generator, num_rows: int, first: NDArray[np.float64], last: NDArray[np.float64]
) -> NDArray[np.int32]:
    """Adapter of each row, int32 `[num_rows]`, while popularity moves from `first` to `last` in a straight line over
    the rows (LoRAServe figure 16).
    """
    progress = np.linspace(0.0, 1.0, num_rows)[:, None]
    cumulative = np.cumsum((1 - progress) * first + progress * last, axis=1)
    drawn = (generator.random(num_rows)[:, None] > cumulative).sum(axis=1)
    return np.asarray(np.minimum(drawn, len(first) - 1), dtype=np.int32)


def poisson_arrivals(generator: np.random.Generator, num_rows: int, rows_per_s: float) -> NDArray[np.float64]:
    """Release times of a Poisson process, float64 `[num_rows]`, rising."""
    return np.cumsum(generator.exponential(1.0 / rows_per_s, num_rows))


def bursty_arrivals(
    generator: np.random.Generator, num_rows: int, rows_per_s: float, *, cv: float = 3.0
) -> NDArray[np.float64]:
    """Gamma-distributed gaps with a coefficient of variation of `cv`: bursts and lulls, as function traces have."""
    shape = 1.0 / cv**2
    return np.cumsum(generator.gamma(shape, 1.0 / (rows_per_s * shape), num_rows))


def bursty_arrivals_per_adapter(
    generator: np.random.Generator, adapter_index: NDArray[np.int32], rows_per_s: float, *, cv: float = 3.0
) -> NDArray[np.float64]:
    """Release times float64 `[num_rows]`: each adapter's rows come in bursts and lulls of their own, as each function's
    calls do in a function trace. Together they take about `num_rows / rows_per_s` seconds."""
    release = np.zeros(len(adapter_index))
    for adapter in np.unique(adapter_index):
        rows = np.flatnonzero(adapter_index == adapter)
        span = len(adapter_index) / rows_per_s
        times = bursty_arrivals(generator, len(rows), len(rows) / span, cv=cv)
        # Lulls may stretch an adapter's few bursts far beyond the run: it starts anywhere in it and goes round.
        release[rows] = np.sort((times + generator.random() * span) % span)
    return release
