"""What a seed means: a cluster, and the blows its processes are dealt. Pure: the same seed, the same scenario."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

# Uneven: echo engines of which one is slow, so that rows move from it to the others.
EngineKind = Literal["echo", "uneven", "real", "staged"]
# Hosts: an existing cluster whose processes have a host of their own each.
ClusterKind = Literal["embedded", "existing", "hosts"]
# Where the output is: a local disk, one so small that it can be filled, or an S3 server.
StoreKind = Literal["disk", "small disk", "s3"]
# Coordinator: the worker that runs the job's coordinator. Owner and helper: those at the two ends of a loan of rows.
# Engine: its process, of a group the leader; member: another process of a group. Workers: all of them at once.
# Base, tokenizer, adapter, input: a file of the job. Part: one that is committed.
FileKind = Literal["base", "tokenizer", "adapter", "input"]
Victim = Literal[
    "client", "worker", "coordinator", "nanny", "engine", "member", "scheduler", "owner", "helper", "store",
    "workers", "base", "tokenizer", "adapter", "input", "part",
]  # fmt: skip
# FULL: the disk is. TIDE: it fills and empties several times. MEMORY: an engine gets no more. CUT: nothing passes
# between a host and its opposite (see `Trial`). ONE WAY: the same in one direction. REPLACED: a file has other contents
# of the same size; a part is another part's copy. TRUNCATED, DELETED: a file is. TAKEN: another user's task has a
# worker's thread. REFUSED: the system gives a worker no thread for its next task. PUTS: uploads are cut in the middle.
# The last four are what an S3 server does, see `s3_server.FAULTS`.
Signal = Literal[
    "KILL", "TERM", "STOP", "FULL", "TIDE", "MEMORY", "CUT", "ONE WAY", "REPLACED", "TRUNCATED", "DELETED", "TAKEN",
    "REFUSED", "PUTS", "500", "503", "lost", "silent",
]  # fmt: skip
Trouble = Literal[
    "full", "memory", "store", "partition", "base", "tokenizer", "adapter", "input", "part", "workers", "thread",
    "puts", "scheduler", "one-way", "tide",
]  # fmt: skip

# Which processes can be hit: an embedded cluster's scheduler and nannies live inside the client.
_VICTIMS: dict[ClusterKind, tuple[Victim, ...]] = {
    "embedded": ("client", "worker", "coordinator", "engine", "engine"),
    "existing": ("client", "worker", "coordinator", "engine", "engine", "nanny", "scheduler"),
}
_OF_GROUPS: tuple[Victim, ...] = ("member", "member", "member")
_SIGNALS: tuple[Signal, ...] = ("KILL", "KILL", "KILL", "TERM", "STOP")
_MAX_BLOWS = 4
# Three crashes clear a row; a fourth, alone in its engine, would rightly make it an error row. A group dies as a whole.
_MAX_ENGINE_BLOWS = 3
_IN_ENGINES: tuple[Victim, ...] = ("engine", "member")
_SHARD_ROWS = (8, 16, 32)
_ENGINES: tuple[EngineKind, ...] = ("echo", "echo", "echo", "uneven", "uneven", "real")
# What else befalls a job, besides signals, and for how long.
_TROUBLES: tuple[Trouble, ...] = ("full", "memory", "store", "partition")
# How long the base has other weights; None: to the end of the client. An engine is killed then in half of the cases.
_REPLACED_S = (0.2, 2.0, None)
_LOADED_AGAIN_S = (0.05, 0.5)
_STORE_FAULTS: tuple[Signal, ...] = ("500", "503", "lost", "silent")
_CUT_OFF: tuple[Victim, ...] = ("worker", "coordinator", "client")
_TROUBLE_S = (0.5, 5.0, 20.0)
# Beyond the 30 s after which a connection over which nothing passes is broken; None: to the end of the job.
_PARTITION_S = (0.5, 5.0, 20.0, 45.0, None)
# Trouble that is drawn after everything else, and for how long each kind lasts; None: to the end of the client.
_LATER_TROUBLES: tuple[Trouble, ...] = (
    "tokenizer", "adapter", "input", "part", "workers", "thread", "puts", "scheduler", "one-way", "tide",
)  # fmt: skip
_LATER_S: dict[Trouble, tuple[float | None, ...]] = {
    "tokenizer": _REPLACED_S,
    "adapter": _REPLACED_S,
    "input": _REPLACED_S,
    "part": (None,),
    "workers": (5.0, 35.0, 70.0),
    "thread": (0.0, 5.0, 40.0, 90.0),
    "puts": (5.0, 20.0, None),
    "scheduler": (20.0, 45.0, 90.0),
    "one-way": _PARTITION_S,
    "tide": (5.0, 20.0),
}
#: The share of a blow that falls between the end of a client and the next one's start.
AFTER_END = 2.0
_MAX_DELAY_S = 0.6
_LONGEST_START_S = 4.0


@dataclass(frozen=True, slots=True)
class Blow:
    """`victim` gets `signal`, `delay_s` after so large a share of the parts is committed (0: after the client's start;
    `AFTER_END`: when a client has ended).

    `pick` chooses among the victims there are; where it is odd, a file is written to in place, and where it is 4 or
    more, a file that no client sees put back is not put back for the next client either. A stopped process goes on
    after `stopped_s` seconds, and so does a store or a network in trouble; a file is put back, and other workers come;
    None: never.
    """

    share: float
    delay_s: float
    victim: Victim
    signal: Signal
    pick: int
    stopped_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of the harness. `is_held_up`: an engine is stopped four fifths of the time, so that rows move from it.
    `tensor_parallel`: processes of each engine."""

    seed: int
    engine: EngineKind
    cluster: ClusterKind
    num_workers: int
    rows_per_shard: int
    blows: tuple[Blow, ...]
    is_held_up: bool = False
    store: StoreKind = "disk"
    tensor_parallel: int = 1


def make_scenario(seed: int, tensor_parallel: int = 1, has_stages: bool = False) -> Scenario:
    """The scenario of a seed. Engines of several processes are real ones. `has_stages`: the job has stages, for echo
    engines.
    """
    luck = random.Random(seed)
    cluster: ClusterKind = luck.choice(("embedded", "existing"))
    engine = luck.choice(_ENGINES)
    if tensor_parallel > 1:
        engine = "real"
    if has_stages:
        engine = "staged"
    num_workers = luck.choice((2, 3) if engine == "uneven" else (1, 2, 2, 2, 3))
    rows_per_shard = 8 if engine == "uneven" else luck.choice(_SHARD_ROWS)
    victims = _VICTIMS[cluster] + (("owner", "owner", "helper", "helper") if engine == "uneven" else ())
    victims += _OF_GROUPS if tensor_parallel > 1 else ()
    blows = [_make_blow(luck, victims) for _ in range(luck.randint(1, _MAX_BLOWS))]
    engine_blows = [blow for blow in blows if blow.victim in _IN_ENGINES]
    spared = engine_blows[_MAX_ENGINE_BLOWS:]
    blows = [blow for blow in blows if not any(blow is one for one in spared)]
    # Drawn last: nothing else of what a seed means depends on it.
    is_held_up = engine == "real" and num_workers > 1 and luck.random() < 0.5
    if is_held_up:
        blows.append(_make_blow(luck, ("owner", "helper")))
    drawn = luck.sample(_TROUBLES, luck.choice((0, 1, 1, 2)))
    store: StoreKind = "s3" if "store" in drawn else "small disk" if "full" in drawn else "disk"
    if "partition" in drawn:
        cluster = "hosts"
    moves_rows = engine == "uneven" or is_held_up
    # A worker must be left: none is cut off for good where others may be gone for good.
    may_last = num_workers > 1 and not any(
        blow.victim == "nanny" or (blow.signal == "STOP" and blow.stopped_s is None) for blow in blows
    )
    more = [_make_trouble(luck, trouble, moves_rows, may_last, len(engine_blows)) for trouble in sorted(drawn)]
    if tensor_parallel > 1:
        more = [_of_group(luck, blow) for blow in more]
    # A disk of a store cannot be filled.
    blows += [blow for blow in more if blow is not None and not (blow.signal == "FULL" and store == "s3")]
    if engine == "real" and luck.random() < 0.5:
        blows += _replace_base(luck, sum(blow.victim in _IN_ENGINES for blow in blows) < _MAX_ENGINE_BLOWS)
    later, cluster, store = _draw_later_troubles(luck, engine, cluster, store)
    may_last &= not any(blow.signal == "CUT" and blow.stopped_s is None for blow in blows)
    for trouble in later:
        may_kill = sum(blow.victim in _IN_ENGINES for blow in blows) < _MAX_ENGINE_BLOWS
        blows += _make_later_trouble(luck, trouble, moves_rows, may_last, may_kill)
    in_order = tuple(sorted(blows, key=lambda blow: blow.share))
    return Scenario(seed, engine, cluster, num_workers, rows_per_shard, in_order, is_held_up, store, tensor_parallel)


def troubles(scenario: Scenario) -> set[Trouble]:
    """What befalls a job besides signals."""
    return {trouble for blow in scenario.blows if (trouble := _trouble(blow)) is not None}


def _trouble(blow: Blow) -> Trouble | None:
    kinds: dict[Signal, Trouble] = {
        "FULL": "full", "TIDE": "tide", "MEMORY": "memory", "CUT": "partition", "ONE WAY": "one-way", "PUTS": "puts",
        "TAKEN": "thread", "REFUSED": "thread",
    }  # fmt: skip
    kinds |= dict.fromkeys(_STORE_FAULTS, "store")
    if blow.victim in ("base", "tokenizer", "adapter", "input", "part", "workers"):
        return blow.victim
    if blow.victim == "scheduler" and blow.signal == "STOP" and blow.stopped_s in _LATER_S["scheduler"]:
        return "scheduler"
    return kinds.get(blow.signal)


def _draw_later_troubles(
    luck: random.Random, engine: EngineKind, cluster: ClusterKind, store: StoreKind
) -> tuple[list[Trouble], ClusterKind, StoreKind]:
    """None to two kinds, and the cluster and the store that they need. Text is what a tokenizer matters to, and only
    real engines read any.
    """
    possible = [trouble for trouble in _LATER_TROUBLES if trouble != "tokenizer" or engine == "real"]
    possible = [trouble for trouble in possible if (trouble, store) not in (("puts", "small disk"), ("tide", "s3"))]
    drawn = luck.sample(possible, luck.choice((0, 1, 1, 2)))
    if {"puts", "tide"} <= {*drawn}:
        drawn = drawn[:1]
    # Few engines are real.
    if engine == "real" and "tokenizer" not in drawn and luck.random() < 0.3:
        drawn.append("tokenizer")
    if "one-way" in drawn:
        cluster = "hosts"
    elif cluster == "embedded" and {"workers", "thread", "scheduler"} & {*drawn}:
        cluster = "existing"
    store = "s3" if "puts" in drawn else "small disk" if "tide" in drawn else store
    return drawn, cluster, store


def _make_later_trouble(
    luck: random.Random, trouble: Trouble, moves_rows: bool, may_last: bool, may_kill: bool
) -> list[Blow]:
    """The blows of one kind."""
    drawn = replace(_make_blow(luck, ("worker",)), stopped_s=luck.choice(_LATER_S[trouble]))
    match trouble:
        case "tokenizer" | "adapter" | "input":
            signal: Signal = luck.choice(("REPLACED", "REPLACED", "DELETED"))
            # The input is read only until the job is planned.
            share = 0.0 if luck.random() < 0.5 else drawn.share
            changed = replace(drawn, victim=trouble, signal=signal, share=share)
            return [changed, *_loaded_again(luck, changed, may_kill and trouble != "input")]
        case "part":
            signal = luck.choice(("REPLACED", "TRUNCATED", "DELETED"))
            share = luck.choice((drawn.share, AFTER_END))
            struck = replace(drawn, victim="part", signal=signal, share=share)
            ends = replace(drawn, victim="client", signal="KILL", share=luck.uniform(0.3, 0.9))
            return [struck, ends] if share == AFTER_END and luck.random() < 0.7 else [struck]
        case "thread":
            return [replace(drawn, signal=luck.choice(("TAKEN", "REFUSED")))]
        case "puts" | "tide":
            return [replace(drawn, victim="store", signal="PUTS" if trouble == "puts" else "TIDE")]
        case "one-way":
            victim = luck.choice(_CUT_OFF + (("owner", "helper") if moves_rows else ()))
            seconds = drawn.stopped_s if may_last else luck.choice(_PARTITION_S[:-1])
            return [replace(drawn, victim=victim, signal="ONE WAY", stopped_s=seconds)]
        case "scheduler":
            return [replace(drawn, victim="scheduler", signal="STOP")]
        case _:
            return [replace(drawn, victim="workers", signal=luck.choice(("KILL", "TERM")))]


def _make_trouble(
    luck: random.Random, trouble: Trouble, moves_rows: bool, may_last: bool, num_engine_blows: int
) -> Blow | None:
    """A blow of another kind than signals, at the moments at which signals come; None: one engine blow too many."""
    drawn = _make_blow(luck, ("engine",))
    stopped_s: float | None = luck.choice(_TROUBLE_S)
    match trouble:
        case "full":
            return replace(drawn, victim="store", signal="FULL", stopped_s=stopped_s)
        case "store":
            return replace(drawn, victim="store", signal=luck.choice(_STORE_FAULTS), stopped_s=stopped_s)
        case "memory":
            is_too_many = num_engine_blows >= _MAX_ENGINE_BLOWS
            return None if is_too_many else replace(drawn, signal="MEMORY", stopped_s=None)
        case "partition":
            victim = luck.choice(_CUT_OFF + (("owner", "helper") if moves_rows else ()))
            seconds = luck.choice(_PARTITION_S if may_last else _PARTITION_S[:-1])
            return replace(drawn, victim=victim, signal="CUT", stopped_s=seconds)


def _replace_base(luck: random.Random, may_kill: bool) -> list[Blow]:
    """The base gets other weights for a while; an engine may be killed, which loads them then."""
    replaced = replace(
        _make_blow(luck, ("base",)), signal="REPLACED", stopped_s=luck.choice(_REPLACED_S), pick=luck.randrange(2)
    )
    return [replaced, *_loaded_again(luck, replaced, may_kill)]


def _loaded_again(luck: random.Random, changed: Blow, may_kill: bool) -> list[Blow]:
    """In half of the cases a blow at an engine, which then loads a file that was changed."""
    loads_again = luck.random() < 0.5
    delay_s = changed.delay_s + luck.choice(_LOADED_AGAIN_S)
    killed = replace(changed, delay_s=delay_s, victim="engine", signal="KILL", stopped_s=None)
    return [killed] if loads_again and may_kill else []


def _of_group(luck: random.Random, blow: Blow | None) -> Blow | None:
    """What befalls an engine befalls its leader or a member."""
    return replace(blow, victim=luck.choice(_IN_ENGINES)) if blow is not None and blow.victim == "engine" else blow


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
