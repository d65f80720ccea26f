"""Captures decode steps as CUDA graphs and replays them.

A graph fixes addresses, shapes and grids, not what is in the step's lists: kernels read the counts from device memory.
So decode steps are padded to a few *buckets* of rows, and a bucket has one graph for any mix of adapters and one for
steps without any.

Capturing takes some 50 ms in which the device is idle. A batch that drains from 512 rows to one passes 32 buckets, most
of them once or twice: such visits replay the graph of a larger bucket, whose padding costs less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

_EXACT_BUCKETS = 8
# Visits of a bucket from which on it has a graph of its own.
_VISITS = 3


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
    """Steps that run the same kernels on the same addresses, which one graph can replay."""

    #: Rows that the step is padded to.
    bucket: int
    #: Whether a row has an adapter.
    has_lora: bool
    #: Whether long contexts are cut into pieces.
    splits: bool
    #: Whether the graph chooses tokens; if not, it ends with logits.
    chooses: bool = False
    #: Whether it computes log-probabilities of the tokens that it chooses.
    wants_logprobs: bool = False
    #: Whether some row may be drawn; if not, the graph chooses tokens of greedy rows alone.
    draws: bool = False


class StepExecutor:
    """Runs the device's part of bucketed steps: here kernel by kernel, for CPUs, and to look for errors on a GPU.

    `work` of one key always launches the same kernels on the same addresses, until `forget`.
    """

    def choose(self, key: GraphKey) -> GraphKey:
        """The key under which a step of `key` is run: `key` itself, or one of a larger bucket."""
        return key

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        """Launch `work` once."""
        work()

    def forget(self) -> None:
        """Drop what depends on addresses: they have changed."""


def graph_for(key: GraphKey, num_visits: int, captured: Collection[GraphKey]) -> GraphKey:
    """The key of the graph for a step of `key`, where there are graphs of the keys `captured`. Buckets that are visited
    again and again get a graph, and the first of their kind. `num_visits`: steps of `key` so far.
    """
    if key in captured or num_visits >= _VISITS:
        return key
    larger = [k for k in captured if k.bucket > key.bucket and replace(k, bucket=key.bucket) == key]
    return min(larger, key=lambda k: k.bucket, default=key)


class GraphExecutor(StepExecutor):
    """Captures the work of a key on its first run and replays it from then on.

    All graphs share one memory pool: one step runs at a time, and no graph's temporary memory is read by another.
    """

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._visits: Counter[GraphKey] = Counter()
        self._pool = torch.cuda.graph_pool_handle()

    def choose(self, key: GraphKey) -> GraphKey:
        """The key of the graph that serves a step of `key`, by `graph_for`."""
        self._visits[key] += 1
        return graph_for(key, self._visits[key], self._graphs.keys())

    def run(self, key: GraphKey, work: Callable[[], None]) -> None:
        """Replay the graph of a key. On its first run launch the kernels, which compiles them, and capture them then.
        Capturing runs nothing, so the step's own numbers are computed once.
        """
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
        """Drop all graphs once no replay is running. The memory pool is a new one, since a pool that lost its last
        graph takes no other.
        """
        torch.cuda.synchronize()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
