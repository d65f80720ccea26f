"""LoRAServe's adapter placement (section IV, Algorithm 1): keep ranks apart, loads equal, and move little.

Six steps, one function each. Load is measured in *utilisation*: an adapter's demand in tokens per second
divided by the tokens per second a server manages at that rank (its operating point), so 1.0 fills one
server.

Shapes: `[num_adapters, num_servers]` for fractions, `[num_adapters]` for ranks, demand and utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .assignment import cheapest_assignment

_EPSILON = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the requests of each adapter go. `fraction` `[num_adapters, num_servers]`, each row sums to 1."""

    fraction: NDArray[np.float64]

    def table(self) -> list[tuple[int, int, float]]:
        """(adapter, server, share) for every share above zero: the routing table of figure 11."""
        adapters, servers = np.nonzero(self.fraction)
        return [(int(a), int(s), float(self.fraction[a, s])) for a, s in zip(adapters, servers, strict=True)]

    def server_of(self, adapter: int, uniform: float) -> int:
        """The server for one request; `uniform` in [0, 1) is the caller's random number."""
        return int(np.searchsorted(np.cumsum(self.fraction[adapter]), uniform, side="right"))

    def check_integrity(self) -> None:
        """Raise AssertionError when a request could get lost."""
        assert (self.fraction >= 0).all(), "a share is negative"
        sums = self.fraction.sum(axis=1)
        assert np.allclose(sums, 1.0), f"adapter {int(np.argmax(abs(sums - 1)))}: shares sum to {sums.min()}"


def assign_loraserve(
    ranks: NDArray[np.int64],
    demand_tps: NDArray[np.float64],
    operating_points: Mapping[int, float],
    num_servers: int,
    *,
    previous: Routing | None = None,
    weight_bytes: NDArray[np.float64] | None = None,
) -> Routing:
    """Algorithm 1. `demand_tps`: step 1's extrapolated demand (`demand.extrapolate`).

    `operating_points`: tokens per second of a server, per rank. `previous` and `weight_bytes` let step 5
    move as few bytes as it can. Without any demand every adapter counts the same.
    """
    assert num_servers >= 1, "no server"
    utilisation = _utilisation(ranks, demand_tps, operating_points)
    target = utilisation.sum() / num_servers
    budget = server_budget(ranks, utilisation, num_servers)
    fraction, is_packed = _pack_ranks(ranks, utilisation, budget, target, num_servers)
    _place_leftovers(ranks, utilisation, fraction, is_packed, target)
    routing = Routing(fraction / fraction.sum(axis=1, keepdims=True))
    if previous is not None:
        size = np.ones(len(ranks)) if weight_bytes is None else weight_bytes
        routing = permute_assignment(routing, previous, size)
    return routing


def _utilisation(
    ranks: NDArray[np.int64], demand_tps: NDArray[np.float64], operating_points: Mapping[int, float]
) -> NDArray[np.float64]:
    """Step 1. Raises KeyError naming a rank that was never profiled."""
    demand = demand_tps if demand_tps.any() else np.ones(len(ranks))
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
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Step 3: fractional bin packing of each rank into its own servers, the most wanted adapters first.

    Returns the fractions so far and which adapters are packed whole.
    """
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
    return fraction, fraction.sum(axis=1) > 1 - 1e-9


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


def _place_leftovers(
    ranks: NDArray[np.int64],
    utilisation: NDArray[np.float64],
    fraction: NDArray[np.float64],
    is_packed: NDArray[np.bool_],
    target: float,
) -> None:
    """Step 4: what is left, by falling rank, to servers whose maximum rank is highest, least utilised first.

    A server that already runs this rank or a higher one is not slowed by it; only when none of those has
    room do others come, again the highest first. When rounding left no room anywhere, the least utilised
    server takes it.
    """
    num_servers = fraction.shape[1]
    leftovers = np.flatnonzero(~is_packed)
    for adapter in leftovers[np.lexsort((-utilisation[leftovers], -ranks[leftovers]))]:
        max_rank = np.where(fraction > 0, ranks[:, None], 0).max(axis=0)
        used = utilisation @ fraction
        room = target - used
        order = np.lexsort((np.arange(num_servers), used, -max_rank, max_rank < ranks[adapter]))
        open_servers = [int(s) for s in order if room[s] > _EPSILON]
        if open_servers:
            _pour(int(adapter), float(utilisation[adapter]), open_servers, room, fraction)
        rest = 1.0 - fraction[adapter].sum()
        if rest > _EPSILON:
            fraction[adapter, int(np.argmin(utilisation @ fraction))] += rest


def permute_assignment(routing: Routing, previous: Routing, weight_bytes: NDArray[np.float64]) -> Routing:
    """Step 5: rename the servers so that as many bytes as possible already lie where they are wanted."""
    wanted = routing.fraction > 0
    there = previous.fraction > 0
    kept = (wanted * weight_bytes[:, None]).T @ there.astype(np.float64)
    renamed = np.zeros_like(routing.fraction)
    renamed[:, cheapest_assignment(-kept)] = routing.fraction
    return Routing(renamed)


def moved_bytes(routing: Routing, previous: Routing, weight_bytes: NDArray[np.float64]) -> float:
    """Bytes that servers must fetch to go from one routing to another."""
    is_new = (routing.fraction > 0) & ~(previous.fraction > 0)
    return float((is_new * weight_bytes[:, None]).sum())
