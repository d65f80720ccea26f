"""Workloads for simulations, from a seed: adapters, their popularity, and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..workload import AdapterInfo, Workload


def make_adapters(ranks: Sequence[int], bytes_per_rank: int = 2_000_000) -> tuple[AdapterInfo, ...]:
    """Adapters named by number and rank; weights grow with the rank."""
    return tuple(AdapterInfo(f"adapter-{i:05}-r{r}", int(r), int(r) * bytes_per_rank) for i, r in enumerate(ranks))


def power_popularity(num_adapters: int, exponent: float) -> NDArray[np.float64]:
    """Popularity that falls as `x ** -exponent` (LoRAServe figure 22): uniform at 0, Zipf's law at 1."""
    weight = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    return np.asarray(weight / weight.sum())


def draw_adapters(generator: np.random.Generator, num_rows: int, popularity: NDArray[np.float64]) -> NDArray[np.int32]:
    """Adapter of each row, int32 `[num_rows]`, by independent draws."""
    return np.asarray(generator.choice(len(popularity), num_rows, p=popularity), dtype=np.int32)


def draw_lengths(
    generator: np.random.Generator, num_rows: int, median: float, sigma: float, most: int
) -> NDArray[np.int32]:
    """Log-normal lengths, at least 1 and at most `most`, int32 `[num_rows]`."""
    drawn = generator.lognormal(np.log(median), sigma, num_rows)
    return np.clip(np.rint(drawn), 1, most).astype(np.int32)


def make_workload(
    adapters: tuple[AdapterInfo, ...],
    adapter_index: NDArray[np.int32],
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    *,
    max_tokens: int | NDArray[np.int32] | None = None,
) -> Workload:
    """A workload from its columns; `max_tokens` (of all rows, or of each) defaults to the longest output."""
    limit = max(1, int(output_tokens.max(initial=1))) if max_tokens is None else max_tokens
    return Workload(
        adapters=adapters,
        adapter_index=adapter_index,
        prompt_tokens=prompt_tokens,
        max_tokens=np.broadcast_to(np.asarray(limit, np.int32), adapter_index.shape).copy(),
        prefix_hash=np.zeros(len(adapter_index), np.uint64),
        output_tokens=np.minimum(output_tokens, limit).astype(np.int32),
    )
