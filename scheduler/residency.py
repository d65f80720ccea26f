"""Which adapters stay in a replica's memory: evict by next use, which offline is known (Belady), and fetch ahead.

A replica meets its adapters in a known order of *uses* (one per shard, in the plan's order). The adapter whose next
use lies furthest ahead goes first; one that is never used again goes before all others. With adapters of one size
this is the fewest loads possible; with mixed sizes it is the usual greedy extension.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidencyStep:
    """Before use number `use`: evict these, then load those. `stays_pinned`: what the use itself needs."""

    use: int
    evict: tuple[str, ...]
    load: tuple[str, ...]
    stays_pinned: tuple[str, ...]


class AdapterTooLargeError(Exception):
    """One use needs more adapter memory than there is: names the adapters, their bytes and the capacity."""


def plan_residency(
    uses: Sequence[Collection[str]],
    weight_bytes: Mapping[str, int],
    capacity_bytes: int,
    *,
    resident: Collection[str] = (),
) -> list[ResidencyStep]:
    """What to evict and load before each use. Raises `AdapterTooLargeError` when a use cannot fit at all."""
    next_uses = _next_uses(uses)
    present = dict.fromkeys(resident)
    steps = []
    for use, needed in enumerate(uses):
        wanted = sorted(set(needed))
        _check_fits(use, wanted, weight_bytes, capacity_bytes)
        load = tuple(name for name in wanted if name not in present)
        used_bytes = sum(weight_bytes[name] for name in {*present, *wanted})
        evict = []
        while used_bytes > capacity_bytes:
            victim = furthest_next_use([name for name in present if name not in wanted], next_uses, use)
            evict.append(victim)
            used_bytes -= weight_bytes[victim]
            del present[victim]
        present |= dict.fromkeys(load)
        steps.append(ResidencyStep(use, tuple(evict), load, tuple(wanted)))
    return steps


def furthest_next_use(candidates: Sequence[str], next_uses: Mapping[str, Sequence[int]], now: int) -> str:
    """The candidate whose next use after `now` is furthest; never used again beats all; ties go by name."""
    forever = 1 << 60
    distance = {name: next((use for use in next_uses.get(name, ()) if use > now), forever) for name in candidates}
    return max(sorted(candidates), key=lambda name: distance[name])


def prefetch(
    steps: Sequence[ResidencyStep], now: int, free_bytes: int, weight_bytes: Mapping[str, int]
) -> tuple[str, ...]:
    """Adapters the use after `now` will load and that fit beside everything present: fetch them meanwhile."""
    if now + 1 >= len(steps):
        return ()
    fetched = []
    for name in steps[now + 1].load:
        if weight_bytes[name] <= free_bytes:
            fetched.append(name)
            free_bytes -= weight_bytes[name]
    return tuple(fetched)


def _next_uses(uses: Sequence[Collection[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for use, needed in enumerate(uses):
        for name in needed:
            found.setdefault(name, []).append(use)
    return found


def _check_fits(use: int, wanted: Sequence[str], weight_bytes: Mapping[str, int], capacity_bytes: int) -> None:
    total = sum(weight_bytes[name] for name in wanted)
    if total > capacity_bytes:
        raise AdapterTooLargeError(
            f"use {use} needs {', '.join(wanted)} at once: {total} bytes, but adapters may take {capacity_bytes}. "
            "Put fewer adapters into one shard, or give the pool more memory."
        )
