"""Captures decode steps as CUDA graphs and replays them.

A graph fixes addresses, shapes and grids, not what is in the step's lists: kernels read the counts from device memory.
So decode steps are padded to a few *buckets* of rows, and a bucket has one graph for any mix of adapters and one for
steps without any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_EXACT_BUCKETS = 8


def bucket_of(num_rows: int) -> int:
    """Rows of the bucket that serves a decode step of `num_rows`.

    Four buckets per doubling: at most a fifth of a bucket is padding, and 512 rows need 32 buckets. Up to 8 rows
    every number is its own bucket.
    """
    if num_rows <= _EXACT_BUCKETS:
        return num_rows
    width = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // width) * width


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Steps that run the same kernels on the same addresses."""

    bucket: int
    has_lora: bool
    wants_logprobs: bool


class StepExecutor(Protocol):
    """Runs the device's part of bucketed steps. `work` of one key always launches the same kernels on the same
    addresses, until `forget`."""

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        """Launch `work` once."""

    def forget(self) -> None:
        """Addresses have changed."""


class EagerExecutor:
    """Launches kernel by kernel: for CPUs, and to look for errors on a GPU."""

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        """See `StepExecutor`."""
        work()

    def forget(self) -> None:
        """Nothing is kept."""


class GraphExecutor:
    """Captures the work of a key on its first run and replays it from then on.

    All graphs share one memory pool: one step runs at a time, and no graph's temporary memory is read by another.
    """

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        """See `StepExecutor`. The first run is eager: it compiles the kernels. Capturing runs nothing, so the step's
        own numbers are computed once."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that reads adapters may take memory meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        self._graphs[key] = graph

    def forget(self) -> None:
        """See `StepExecutor`. A replay may be running, and a memory pool that lost its last graph takes no other."""
        torch.cuda.synchronize()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
