"""Placements of adapters on servers while requests keep arriving, beside LoRAServe's: the baselines that it is compared
with, what its online steps add to it, and dLoRA's replication.

A placement is the share of each adapter's requests that goes to each server, float64 `[num_adapters, num_servers]`; a
row sums to 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def extrapolate(history: ArrayLike) -> NDArray[np.float64]:
    """Next time step's tokens per second of each adapter (LoRAServe Algorithm 1, step 1).

    `history` `[num_steps, num_adapters]`, oldest first. A straight line through the last steps (at most four), never
    below zero. One step repeats; none is refused.
    """
    seen = np.atleast_2d(np.asarray(history, dtype=np.float64))[-4:]
    assert len(seen) >= 1, "history holds no time step"
    if len(seen) == 1:
        return np.asarray(seen[0].copy())
    steps = np.arange(len(seen)) - (len(seen) - 1) / 2
    slope = steps @ (seen - seen.mean(axis=0)) / (steps @ steps)
    return np.asarray(np.maximum(0.0, seen.mean(axis=0) + slope * (steps[-1] + 1)))


def permute_assignment(
    routing: NDArray[np.float64], previous: NDArray[np.float64], weight_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rename the servers so that as many bytes as possible are already where they are wanted (LoRAServe Algorithm 1,
    step 5).

    `routing` and `previous`: shares of each adapter's requests. `weight_bytes` `[num_adapters]`.
    """
    wanted = routing > 0
    there = previous > 0
    kept = (wanted * weight_bytes[:, None]).T @ there.astype(np.float64)
    renamed = np.zeros_like(routing)
    renamed[:, cheapest_assignment(-kept)] = routing
    return renamed


def cheapest_assignment(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column of each row, so that no column is taken twice and the sum of costs is least.

    `cost` `[n, n]`, finite. Cubic in `n`; the inner loop over columns is vectorised. Deterministic under ties.
    """
    n = len(cost)
    assert cost.shape == (n, n), f"cost is {cost.shape}, expected a square"
    row_price = np.zeros(n + 1)
    column_price = np.zeros(n + 1)
    # Column n is a sentinel that holds the row being placed; row n means that a column is free.
    row_of = np.full(n + 1, n, dtype=np.int64)
    for row in range(n):
        row_of[n] = row
        came_from = _grow_path(cost, row_of, row_price, column_price)
        column = int(came_from[n + 1])
        while column != n:
            before = int(came_from[column])
            row_of[column] = row_of[before]
            column = before
    column_of = np.empty(n, dtype=np.int64)
    column_of[row_of[:n]] = np.arange(n)
    return column_of


def _grow_path(
    cost: NDArray[np.float64],
    row_of: NDArray[np.int64],
    row_price: NDArray[np.float64],
    column_price: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Shortest path from the sentinel to a free column; prices are adjusted on the way.

    Returns `[n + 2]`: the column before each column on its path; the last entry is the free column found.
    """
    n = len(cost)
    distance = np.full(n, np.inf)
    came_from = np.full(n + 2, n, dtype=np.int64)
    is_done = np.zeros(n + 1, dtype=bool)
    column = n
    while row_of[column] != n or column == n:
        is_done[column] = True
        row = row_of[column]
        reduced = cost[row] - row_price[row] - column_price[:n]
        is_shorter = ~is_done[:n] & (reduced < distance)
        distance[is_shorter] = reduced[is_shorter]
        came_from[:n][is_shorter] = column
        column = int(np.argmin(np.where(is_done[:n], np.inf, distance)))
        delta = distance[column]
        row_price[row_of[is_done]] += delta
        column_price[is_done] -= delta
        distance[~is_done[:n]] -= delta
    came_from[n + 1] = column
    return came_from


def place_random(num_adapters: int, num_servers: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Each adapter on one server drawn at random (LoRAServe's baseline "S-LoRA Random")."""
    return _whole(generator.integers(0, num_servers, num_adapters), num_servers)


def place_contiguous(ranks: NDArray[np.int64], num_servers: int) -> NDArray[np.float64]:
    """Adapters in order of rank, an equal number on each server ("S-LoRA Contiguous")."""
    position = np.empty(len(ranks), dtype=np.int64)
    position[np.argsort(ranks, kind="stable")] = np.arange(len(ranks))
    return _whole(position * num_servers // max(1, len(ranks)), num_servers)


def place_round_robin(num_adapters: int, num_servers: int) -> NDArray[np.float64]:
    """Adapter `i` on server `i mod num_servers`."""
    return _whole(np.arange(num_adapters) % num_servers, num_servers)


def _whole(server_of_adapter: NDArray[np.int64], num_servers: int) -> NDArray[np.float64]:
    fraction = np.zeros((len(server_of_adapter), num_servers))
    fraction[np.arange(len(server_of_adapter)), server_of_adapter] = 1.0
    return fraction


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
    """Preload the adapter with the lowest burst tolerance on one more replica, until the minimum would decrease.

    dLoRA section 5.1. Among replicas without it, the one with most free memory takes the copy. Copies cost
    memory that requests need, which is why it ends; a copy that leaves the minimum as it is, as with tied adapters, is
    made. Ties go to the smaller number.
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
        if after.min() < lowest.min():
            return placed
        placed, lowest = trial, after
    return placed
