"""Workloads for simulations, from a seed: popularity, ranks, lengths and arrivals of the papers' experiments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..workload import AdapterInfo, Workload


def make_adapters(ranks: Sequence[int], bytes_per_rank: int = 2_000_000) -> tuple[AdapterInfo, ...]:
    """Adapters named by number and rank; weights grow with the rank."""
    return tuple(AdapterInfo(f"adapter-{i:05}-r{r}", int(r), int(r) * bytes_per_rank) for i, r in enumerate(ranks))


def uniform_popularity(num_adapters: int) -> NDArray[np.float64]:
    """Popularity of adapters that are all alike, float64 `[num_adapters]`."""
    return np.full(num_adapters, 1.0 / num_adapters)


def power_popularity(num_adapters: int, exponent: float) -> NDArray[np.float64]:
    """Popularity that falls as `x ** -exponent` (LoRAServe figure 22; Zipf's law at 1)."""
    weight = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    return np.asarray(weight / weight.sum())


def top_five_popularity(num_adapters: int, share: float = 0.7) -> NDArray[np.float64]:
    """Popularity in which five adapters carry `share` of the requests (LoRAServe figure 8), the others the rest."""
    top = min(5, num_adapters)
    weight = np.full(num_adapters, (1.0 - share) / max(1, num_adapters - top))
    weight[:top] = share / top
    return np.asarray(weight / weight.sum())


def draw_adapters(generator: np.random.Generator, num_rows: int, popularity: NDArray[np.float64]) -> NDArray[np.int32]:
    """Adapter of each row, int32 `[num_rows]`, by independent draws."""
    return np.asarray(generator.choice(len(popularity), num_rows, p=popularity), dtype=np.int32)


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


def draw_lengths(
    generator: np.random.Generator, num_rows: int, median: float, sigma: float, most: int
) -> NDArray[np.int32]:
    """Log-normal lengths, at least 1 and at most `most`, int32 `[num_rows]`."""
    drawn = generator.lognormal(np.log(median), sigma, num_rows)
    return np.clip(np.rint(drawn), 1, most).astype(np.int32)


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


def make_workload(
    adapters: tuple[AdapterInfo, ...],
    adapter_index: NDArray[np.int32],
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    *,
    max_tokens: int | NDArray[np.int32] | None = None,
    release_s: NDArray[np.float64] | None = None,
) -> Workload:
    """A workload from its columns; `max_tokens` (of all rows, or of each) defaults to the longest output."""
    limit = max(1, int(output_tokens.max(initial=1))) if max_tokens is None else max_tokens
    return Workload(
        adapters=adapters,
        adapter_index=adapter_index,
        prompt_tokens=prompt_tokens,
        max_tokens=np.broadcast_to(np.asarray(limit, np.int32), adapter_index.shape).copy(),
        prefix_hash=np.zeros(len(adapter_index), np.uint64),
        release_s=release_s,
        output_tokens=np.minimum(output_tokens, limit).astype(np.int32),
    )
