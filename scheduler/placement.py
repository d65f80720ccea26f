"""Which adapters live on which replicas while requests keep arriving: dLoRA's replication and the baselines.

Offline placement of a whole job is `makespan.py`; LoRAServe's is `loraserve.py`.
Shapes: `[num_adapters, num_servers]` unless said otherwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .loraserve import Routing


def place_random(num_adapters: int, num_servers: int, generator: np.random.Generator) -> Routing:
    """Each adapter on one server drawn at random (LoRAServe's baseline "S-LoRA Random")."""
    return _whole(generator.integers(0, num_servers, num_adapters), num_servers)


def place_contiguous(ranks: NDArray[np.int64], num_servers: int) -> Routing:
    """Adapters in order of rank, an equal number on each server ("S-LoRA Contiguous")."""
    position = np.empty(len(ranks), dtype=np.int64)
    position[np.argsort(ranks, kind="stable")] = np.arange(len(ranks))
    return _whole(position * num_servers // max(1, len(ranks)), num_servers)


def place_round_robin(num_adapters: int, num_servers: int) -> Routing:
    """Adapter `i` on server `i mod num_servers`."""
    return _whole(np.arange(num_adapters) % num_servers, num_servers)


def place_everywhere(num_adapters: int, num_servers: int) -> Routing:
    """Every adapter on every server, as Toppings assumes."""
    return Routing(np.full((num_adapters, num_servers), 1.0 / num_servers))


def _whole(server_of_adapter: NDArray[np.int64], num_servers: int) -> Routing:
    fraction = np.zeros((len(server_of_adapter), num_servers))
    fraction[np.arange(len(server_of_adapter)), server_of_adapter] = 1.0
    return Routing(fraction)


def burst_tolerance(
    is_resident: NDArray[np.bool_],
    average_load: NDArray[np.float64],
    weight_bytes: NDArray[np.float64],
    memory_bytes: NDArray[np.float64],
    request_bytes: float,
) -> NDArray[np.float64]:
    """`[num_adapters]`: peak capacity over average load (dLoRA section 5.1); infinite without load.

    Peak capacity: requests that fit into the unallocated memory of the replicas where the adapter resides.
    `memory_bytes` `[num_servers]`: for adapters and requests together.
    """
    free = np.maximum(0.0, memory_bytes - weight_bytes @ is_resident)
    capacity = (is_resident @ free) / request_bytes
    has_load = average_load > 0
    return np.where(has_load, capacity / np.where(has_load, average_load, 1.0), np.inf)


def replicate_for_bursts(
    is_resident: NDArray[np.bool_],
    average_load: NDArray[np.float64],
    weight_bytes: NDArray[np.float64],
    memory_bytes: NDArray[np.float64],
    request_bytes: float,
) -> NDArray[np.bool_]:
    """Preload the adapter with the lowest burst tolerance on one more replica, until the minimum would fall.

    dLoRA section 5.1. Among replicas without it, the one with most free memory takes the copy. Copies cost
    memory that requests need, which is why it ends. Ties go to the smaller number.
    """
    placed = is_resident.copy()
    lowest = burst_tolerance(placed, average_load, weight_bytes, memory_bytes, request_bytes)
    while len(lowest):
        adapter = int(np.argmin(lowest))
        free = memory_bytes - weight_bytes @ placed
        is_candidate = ~placed[adapter] & (free >= weight_bytes[adapter])
        if not is_candidate.any():
            return placed
        trial = placed.copy()
        trial[adapter, int(np.argmax(np.where(is_candidate, free, -np.inf)))] = True
        after = burst_tolerance(trial, average_load, weight_bytes, memory_bytes, request_bytes)
        if after.min() <= lowest.min():
            return placed
        placed, lowest = trial, after
    return placed
