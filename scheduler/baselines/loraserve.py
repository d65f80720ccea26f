"""Placement of adapters on servers while requests keep arriving: LoRAServe's (section IV, Algorithm 1), dLoRA's
replication, and the baselines that LoRAServe is compared with.

LoRAServe's steps are one function each; they keep ranks apart and loads equal, and move few bytes. Load is measured in
*utilisation*: an adapter's demand in tokens per second divided by the tokens per second a server manages at that rank
(its operating point), so that 1.0 fills one server. Offline placement of a whole job is `planning/placement.py`.

Shapes: `[num_adapters, num_servers]` for fractions, `[num_adapters]` for ranks, demand and utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_EPSILON = 1e-12
_LEVEL_ROUNDS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Share of each adapter's requests that goes to each server."""

    #: Shares, float64 `[num_adapters, num_servers]`; each row sums to 1.
    fraction: NDArray[np.float64]

    def check_integrity(self) -> None:
        """Raise AssertionError when a request could get lost."""
        assert (self.fraction >= 0).all(), "a share is negative"
        sums = self.fraction.sum(axis=1)
        assert np.allclose(sums, 1.0), f"adapter {int(np.argmax(abs(sums - 1)))}: shares sum to {sums.min()}"


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


def assign_loraserve(
    ranks: NDArray[np.int64],
    demand_tps: NDArray[np.float64],
    operating_points: Mapping[int, float],
    num_servers: int,
    *,
    previous: Routing | None = None,
    weight_bytes: NDArray[np.float64] | None = None,
) -> Routing:
    """Algorithm 1: the share of each adapter's requests that goes to each server.

    `demand_tps`: step 1's demand (`extrapolate`). `operating_points`: tokens per second of a server, per rank.
    `previous` and `weight_bytes` let step 5 move as few bytes as it can. Without any demand every adapter counts the
    same.
    """
    assert num_servers >= 1, "no server"
    demand = demand_tps if demand_tps.any() else np.ones(len(ranks))
    utilisation = _utilisation(ranks, demand, operating_points)
    target = utilisation.sum() / num_servers
    budget = server_budget(ranks, utilisation, num_servers)
    packed = _pack_ranks(ranks, utilisation, budget, target, num_servers)
    fraction = _Leftovers(ranks, demand, operating_points).place(packed, target)
    routing = Routing(fraction / fraction.sum(axis=1, keepdims=True))
    if previous is not None:
        size = np.ones(len(ranks)) if weight_bytes is None else weight_bytes
        routing = permute_assignment(routing, previous, size)
    return routing


def _utilisation(
    ranks: NDArray[np.int64], demand: NDArray[np.float64], operating_points: Mapping[int, float]
) -> NDArray[np.float64]:
    """Step 1: demand of each adapter over its rank's operating point. Raises KeyError for an unprofiled rank."""
    return demand / np.array([operating_points[int(rank)] for rank in ranks], dtype=np.float64)


def server_budget(ranks: NDArray[np.int64], utilisation: NDArray[np.float64], num_servers: int) -> dict[int, int]:
    """Step 2: servers each rank may have for itself: its utilisation over the target, rounded.

    Rounding can hand out more servers than there are; then the ranks that gained most by rounding give back.
    """
    target = utilisation.sum() / num_servers
    wanted = {int(rank): float(utilisation[ranks == rank].sum() / target) for rank in np.unique(ranks)}
    budget = {rank: int(np.floor(share + 0.5)) for rank, share in wanted.items()}
    while sum(budget.values()) > num_servers:
        generous = max((rank for rank in budget if budget[rank]), key=lambda r: (budget[r] - wanted[r], -r))
        budget[generous] -= 1
    return budget


def _pack_ranks(
    ranks: NDArray[np.int64],
    utilisation: NDArray[np.float64],
    budget: Mapping[int, int],
    target: float,
    num_servers: int,
) -> NDArray[np.float64]:
    """Step 3: fractional bin packing of each rank into its own servers, the most wanted adapters first."""
    fraction = np.zeros((len(ranks), num_servers))
    first = 0
    for rank in sorted(budget, reverse=True):
        last = first + budget[rank]
        room = np.full(num_servers, 0.0)
        room[first:last] = target
        members = np.flatnonzero(ranks == rank)
        if budget[rank]:
            for adapter in members[np.argsort(-utilisation[members], kind="stable")]:
                _pour(int(adapter), float(utilisation[adapter]), list(range(first, last)), room, fraction)
        first = last
    return fraction


def _pour(
    adapter: int, load: float, servers: list[int], room: NDArray[np.float64], fraction: NDArray[np.float64]
) -> None:
    """Fill servers in order with an adapter's load, splitting it where one is full."""
    left = 1.0 - float(fraction[adapter].sum())
    if load <= _EPSILON:
        fraction[adapter, servers[0]] += left
        return
    for server in servers:
        poured = min(left, max(0.0, float(room[server])) / load)
        if poured > _EPSILON:
            fraction[adapter, server] += poured
            room[server] -= poured * load
            left -= poured


class _Leftovers:
    """Step 4: what is left, by falling rank, to servers whose maximum rank is highest, least utilised first.

    A server that already runs this rank or a higher one is not slowed by it. Other servers follow only when no such
    server has room, again the highest first. A server's load is counted at the rank it runs at, its maximum (section
    III-A5: small ranks pay for large ones), so a mixed server is full sooner; the level to which servers are filled is
    the lowest at which everything has a place.
    """

    def __init__(self, ranks: NDArray[np.int64], demand: NDArray[np.float64], points: Mapping[int, float]) -> None:
        self._ranks, self._demand, self._points = ranks, demand, points

    def place(self, packed: NDArray[np.float64], target: float) -> NDArray[np.float64]:
        """Fractions with everything placed. `packed`: fractions of step 3, filled to `target`."""
        highest = self._points[int(self._ranks.max(initial=0))] if len(self._ranks) else 1.0
        low, high = target, max(target, float(self._demand.sum()) / highest / packed.shape[1]) * (1 + 1e-9)
        found = self._fill(packed, low)
        if self._is_placed(found):
            return found
        for _ in range(_LEVEL_ROUNDS):
            middle = (low + high) / 2
            found = self._fill(packed, middle)
            low, high = (low, middle) if self._is_placed(found) else (middle, high)
        return self._rest_anywhere(self._fill(packed, high))

    def _is_placed(self, fraction: NDArray[np.float64]) -> bool:
        return bool((fraction.sum(axis=1) > 1 - 1e-9).all())

    def _fill(self, packed: NDArray[np.float64], level: float) -> NDArray[np.float64]:
        fraction = packed.copy()
        leftovers = np.flatnonzero(fraction.sum(axis=1) <= 1 - 1e-9)
        for adapter in leftovers[np.lexsort((-self._demand[leftovers], -self._ranks[leftovers]))].tolist():
            max_rank = np.where(fraction > 0, self._ranks[:, None], 0).max(axis=0)
            runs_at = np.maximum(max_rank, self._ranks[adapter])
            speed = np.array([self._points[int(rank)] for rank in runs_at])
            used = self._demand @ fraction / speed
            order = np.lexsort((np.arange(len(used)), used, -max_rank, max_rank < self._ranks[adapter]))
            room = level - used
            for server in order.tolist():
                if room[server] > _EPSILON:
                    _pour(adapter, float(self._demand[adapter] / speed[server]), [server], room, fraction)
        return fraction

    def _rest_anywhere(self, fraction: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give what rounding has left to the server with the least demand."""
        for adapter in np.flatnonzero(fraction.sum(axis=1) <= 1 - 1e-9).tolist():
            fraction[adapter, int(np.argmin(self._demand @ fraction))] += 1.0 - fraction[adapter].sum()
        return fraction


def permute_assignment(routing: Routing, previous: Routing, weight_bytes: NDArray[np.float64]) -> Routing:
    """Step 5: rename the servers so that as many bytes as possible are already where they are wanted."""
    wanted = routing.fraction > 0
    there = previous.fraction > 0
    kept = (wanted * weight_bytes[:, None]).T @ there.astype(np.float64)
    renamed = np.zeros_like(routing.fraction)
    renamed[:, cheapest_assignment(-kept)] = routing.fraction
    return Routing(renamed)


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
