"""LoRAServe's placement of adapters on servers (section IV, Algorithm 1).

Its steps are one function each; they keep ranks apart and loads equal. Load is measured in *utilisation*: an adapter's
demand in tokens per second divided by the tokens per second a server manages at that rank (its operating point), so
that 1.0 fills one server. Step 5 keeps adapters where they are while requests keep arriving: a job, whose adapters are
placed once, has no use for it. Step 4 is there twice: as in the paper, and levelled, which is this project's. The
planner's own placement is `planning/placement.py`.

Shapes: `[num_adapters, num_servers]` for fractions, `[num_adapters]` for ranks, demand and utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: Way in which step 4 places what step 3 has left: `whole` gives an adapter to one server, as the paper does;
#: `levelled` splits it.
Leftovers = Literal["whole", "levelled"]

_EPSILON = 1e-12
_LEVEL_ROUNDS = 30


def assign_loraserve(
    ranks: NDArray[np.int64],
    demand_tps: NDArray[np.float64],
    operating_points: Mapping[int, float],
    num_servers: int,
    leftovers: Leftovers = "whole",
) -> NDArray[np.float64]:
    """Algorithm 1, steps 1 to 4: the share of each adapter's requests that goes to each server; a row sums to 1.

    `demand_tps`: demand of the coming time step. `operating_points`: tokens per second of a server, per rank. Without
    any demand every adapter counts the same.
    """
    assert num_servers >= 1, "no server"
    demand = demand_tps if demand_tps.any() else np.ones(len(ranks))
    utilisation = _utilisation(ranks, demand, operating_points)
    target = utilisation.sum() / num_servers
    budget = server_budget(ranks, utilisation, num_servers)
    packed = _pack_ranks(ranks, utilisation, budget, target, num_servers)
    if leftovers == "whole":
        fraction = _each_whole(ranks, utilisation, packed, target)
    else:
        fraction = _Levelled(ranks, demand, operating_points).place(packed, target)
    return np.asarray(fraction / fraction.sum(axis=1, keepdims=True))


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


def _each_whole(
    ranks: NDArray[np.int64], utilisation: NDArray[np.float64], packed: NDArray[np.float64], target: float
) -> NDArray[np.float64]:
    """Step 4 as in the paper (lines 24 to 28): what is left of each adapter, by falling rank, goes to one server.

    That is "the server with highest max rank and least utilization" (line 27) among those that it does not fill beyond
    the target, by which "if possible" of the text is read; the least utilised of all where there is none. Utilisation
    is that of step 1, of each adapter's own rank.
    """
    fraction = packed.copy()
    left = np.flatnonzero(fraction.sum(axis=1) <= 1 - 1e-9)
    for adapter in left[np.lexsort((-utilisation[left], -ranks[left]))].tolist():
        rest = 1.0 - float(fraction[adapter].sum())
        used = utilisation @ fraction
        max_rank = np.where(fraction > 0, ranks[:, None], 0).max(axis=0)
        is_possible = used + rest * utilisation[adapter] <= target * (1 + 1e-9)
        order = np.lexsort((used, np.where(is_possible, -max_rank, 0), ~is_possible))
        fraction[adapter, order[0]] += rest
    return fraction


class _Levelled:
    """Step 4 of this project: what is left, by falling rank, to servers whose maximum rank is highest, least utilised
    first, split where a server is full.

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
