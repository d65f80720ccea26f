"""What a seed means: a cluster, and the blows its processes are dealt. Pure: the same seed, the same scenario."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Uneven: echo engines of which one is slow, so that rows move from it to the others.
EngineKind = Literal["echo", "uneven", "real"]
ClusterKind = Literal["embedded", "existing"]
# Coordinator: the worker that runs the job's coordinator. Owner and helper: those at the two ends of a loan of rows.
Victim = Literal["client", "worker", "coordinator", "nanny", "engine", "scheduler", "owner", "helper"]
Signal = Literal["KILL", "TERM", "STOP"]

# Which processes can be hit: an embedded cluster's scheduler and nannies live inside the client.
_VICTIMS: dict[ClusterKind, tuple[Victim, ...]] = {
    "embedded": ("client", "worker", "coordinator", "engine", "engine"),
    "existing": ("client", "worker", "coordinator", "engine", "engine", "nanny", "scheduler"),
}
_SIGNALS: tuple[Signal, ...] = ("KILL", "KILL", "KILL", "TERM", "STOP")
_MAX_BLOWS = 4
# Three crashes clear a row; a fourth, alone in its engine, would rightly make it an error row.
_MAX_ENGINE_BLOWS = 3
_SHARD_ROWS = (8, 16, 32)
_ENGINES: tuple[EngineKind, ...] = ("echo", "echo", "echo", "uneven", "uneven", "real")
_MAX_DELAY_S = 0.6
_LONGEST_START_S = 4.0


@dataclass(frozen=True, slots=True)
class Blow:
    """`victim` gets `signal`, `delay_s` after so large a share of the parts is committed (0: after the client's start).

    `pick` chooses among the victims there are. A stopped process goes on after `stopped_s` seconds; None: never.
    """

    share: float
    delay_s: float
    victim: Victim
    signal: Signal
    pick: int
    stopped_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of the harness. `is_held_up`: an engine is stopped four fifths of the time, so that rows move from it."""

    seed: int
    engine: EngineKind
    cluster: ClusterKind
    num_workers: int
    rows_per_shard: int
    blows: tuple[Blow, ...]
    is_held_up: bool = False


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    luck = random.Random(seed)
    cluster: ClusterKind = luck.choice(("embedded", "existing"))
    engine = luck.choice(_ENGINES)
    num_workers = luck.choice((2, 3) if engine == "uneven" else (1, 2, 2, 2, 3))
    rows_per_shard = 8 if engine == "uneven" else luck.choice(_SHARD_ROWS)
    victims = _VICTIMS[cluster] + (("owner", "owner", "helper", "helper") if engine == "uneven" else ())
    blows = [_make_blow(luck, victims) for _ in range(luck.randint(1, _MAX_BLOWS))]
    engine_blows = [blow for blow in blows if blow.victim == "engine"]
    spared = engine_blows[_MAX_ENGINE_BLOWS:]
    blows = [blow for blow in blows if not any(blow is one for one in spared)]
    # Drawn last: nothing else of what a seed means depends on it.
    is_held_up = engine == "real" and num_workers > 1 and luck.random() < 0.5
    if is_held_up:
        blows.append(_make_blow(luck, ("owner", "helper")))
    in_order = tuple(sorted(blows, key=lambda blow: blow.share))
    return Scenario(seed, engine, cluster, num_workers, rows_per_shard, in_order, is_held_up)


def _make_blow(luck: random.Random, victims: Sequence[Victim]) -> Blow:
    moment = luck.random()
    if moment < 0.2:
        share, delay_s = 0.0, luck.uniform(0.0, _LONGEST_START_S)
    elif moment < 0.85:
        share, delay_s = luck.uniform(0.01, 0.95), luck.uniform(0.0, _MAX_DELAY_S)
    else:
        # Between the last part and `_SUCCESS`.
        share, delay_s = 1.0, luck.uniform(0.0, 0.2)
    signal = luck.choice(_SIGNALS)
    stopped_s = luck.choice((None, 0.5, 5.0, 20.0)) if signal == "STOP" else None
    return Blow(share, delay_s, luck.choice(victims), signal, luck.randrange(8), stopped_s)
