"""Parts of the scheduler's state: shards and replicas, the queue of pending shards, where replicas get adapters.

Which pending shard a replica opens next (`ShardQueue.take`): first come those of the job's canary, then those that the
plan places on the replica, then those of replicas that are not there, then those of the others. Among these, waves are
ranked by the predicted length of their next rows, by powers of two, since the rows that run longest must not start
last. Among equals, affinity decides: a replica goes on with the waves of one adapter that it has open, since the
adapter is resident, before it starts another. A new wave is the one with the most pending work per replica already on
it, so that replicas spread over the adapters first and help each other later. Within a wave the plan's order holds.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import ClassVar, Protocol

import numpy as np

from ..messages import AdapterFetch
from ..planning.waves import Shard

#: More than any power of two by which lengths are ranked.
_ABOVE_ALL_CLASSES = 1000.0


class ShardStatus(Enum):
    """Status of a shard: pending in a queue, open on a replica, or committed, with its part written."""

    QUEUED = "queued"
    OPEN = "open"
    COMMITTED = "committed"


# A queued shard becomes committed when an attempt that was given up writes the part after all.
_TRANSITIONS = {
    (ShardStatus.QUEUED, ShardStatus.OPEN),
    (ShardStatus.OPEN, ShardStatus.QUEUED),
    (ShardStatus.OPEN, ShardStatus.COMMITTED),
    (ShardStatus.QUEUED, ShardStatus.COMMITTED),
}


@dataclass(slots=True)
class ShardState:
    """One shard of the job, and how its attempts went."""

    #: The shard as planned.
    shard: Shard
    #: Its status; `move` changes it.
    status: ShardStatus = ShardStatus.QUEUED
    #: Replica that has it open (None: no replica has).
    owner: str | None = None
    #: Number of the attempt; counts from 0 and grows whenever the shard is queued again.
    attempt: int = 0
    #: Attempts that failed on a replica that is alive.
    failures: int = 0
    #: Attempts that were lost with their replica. A shard that was handed over in good order was not lost.
    losses: int = 0
    #: Replicas where it failed; others are tried first.
    failed_on: frozenset[str] = frozenset()

    def move(self, status: ShardStatus, owner: str | None = None) -> None:
        """Change the status; any but the transitions above is a fault of the scheduler."""
        assert (self.status, status) in _TRANSITIONS, f"shard {self.shard.shard_id}: {self.status} -> {status}"
        self.status, self.owner = status, owner


@dataclass(slots=True)
class ReplicaState:
    """One replica as the scheduler sees it."""

    #: Id of the replica.
    replica_id: str
    #: Sequences it decodes together.
    batch_rows: int
    #: Unfinished rows of each shard open there, by shard id.
    rows_left: dict[int, int] = field(default_factory=dict)
    #: Open shards that its last report listed.
    reported: frozenset[int] = frozenset()
    #: Unfinished rows of all its open shards: the sum of `rows_left`.
    open_rows: int = 0
    #: These rows in mean rows of the job.
    open_work: float = 0.0

    def set_rows_left(self, shard_id: int, rows: int) -> None:
        """Note that a shard is open here with `rows` unfinished rows."""
        self.open_rows += rows - self.rows_left.get(shard_id, 0)
        self.rows_left[shard_id] = rows

    def close(self, shard_id: int) -> None:
        """Note that a shard is open here no more."""
        self.open_rows -= self.rows_left.pop(shard_id)
        # it may be opened again before a report lists it
        self.reported -= {shard_id}


class DispatchRule(Protocol):
    """Pending shards, and which of them a replica opens next. Shards given at construction are all pending.

    `is_shared`: any replica may open any shard, so that rows are given out by pace. Otherwise a replica opens what is
    its own as soon as its limit of open rows allows.
    """

    is_shared: ClassVar[bool]

    def __len__(self) -> int: ...

    def __contains__(self, shard_id: int) -> bool: ...

    def take(self, replica_id: str, is_allowed: Callable[[int], bool]) -> int | None:
        """Remove and return the shard this replica should open next; None when there is none for it."""

    def put_back(self, shard_id: int) -> None:
        """Queue a shard that was taken again."""

    def discard(self, shard_id: int) -> None:
        """Remove a shard."""

    def opened(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica."""

    def closed(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica no more."""

    def removed(self, replica_id: str) -> None:
        """Drop a replica that has no open shards any more."""

    def correct_length(self, adapter_id: str | None, tokens_per_row: float) -> None:
        """Take in the mean length of the finished rows of one adapter or, for None, of the base model."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the state contradicts itself."""


class _ReplicaNumbers:
    """The numbers that replicas have in the plan: given out as they come, and free again when they leave."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def of(self, replica_id: str) -> int:
        """The replica's number: the least that is free, if it has none yet."""
        if replica_id not in self._number:
            taken = self.taken
            self._number[replica_id] = next(number for number in count() if number not in taken)
        return self._number[replica_id]

    def keep(self, replica_id: str, number: int | None) -> None:
        """Give a replica of an earlier scheduler the number that its shards have, if that is free."""
        if number is not None and replica_id not in self._number and number not in self.taken:
            self._number[replica_id] = number

    def free(self, replica_id: str) -> None:
        """Take the number of a replica that is gone back."""
        self._number.pop(replica_id, None)

    @property
    def taken(self) -> set[int]:
        """Numbers of the replicas that are there."""
        return set(self._number.values())


class ShardQueue:
    """Pending shards by wave and by the replica that the plan places them on. Shards given at construction are all
    pending.

    Any replica may open any shard: the placement decides the order. Taking a shard costs one pass over an array of
    waves, however many shards there are.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = {shard.shard_id: shard for shard in shards}
        self._position = {shard.shard_id: i for i, shard in enumerate(shards)}
        # A wave that is placed on several replicas counts as one for each.
        waves = sorted({_placed_wave(shard) for shard in shards})
        self._number = {wave: i for i, wave in enumerate(waves)}
        # Number of the replica that each wave is placed on; -1: on none.
        self._home = np.array([home for _, home in waves], np.int64)
        canary = {_placed_wave(shard) for shard in shards if shard.is_canary}
        self._is_canary = np.array([wave in canary for wave in waves], bool)
        self._replicas = _ReplicaNumbers()
        # By wave number; each list is in reverse order of the plan, so that the next shard is cheap to remove.
        self._pending: list[list[int]] = [[] for _ in waves]
        self._pending_work = np.zeros(len(waves))
        self._num_servers = np.zeros(len(waves))
        self._length_class = np.full(len(waves), -1.0)
        # Measured over predicted output tokens per row, of waves of one adapter; 1 until rows have finished.
        self._correction = np.ones(len(waves))
        self._waves_of = _waves_of_one_adapter(shards, self._number)
        # A shard of any other wave has adapters of its own: a replica gains nothing by staying with such a wave.
        self._of_one_adapter = {wave for waves in self._waves_of.values() for wave, _ in waves}
        self._all_work = 1.0 + sum(_work(shard) for shard in shards)
        self._num_shards = 0
        # replica -> wave number -> shards of that wave open there; empty entries are removed.
        self._open: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for shard in reversed(shards):
            self._insert(shard)

    def __len__(self) -> int:
        return self._num_shards

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._pending[self._wave(shard_id)]

    def _wave(self, shard_id: int) -> int:
        return self._number[_placed_wave(self._shards[shard_id])]

    def take(self, replica_id: str, is_allowed: Callable[[int], bool]) -> int | None:
        """Remove and return the shard this replica should open next; None when none is allowed."""
        if not self._num_shards:
            return None
        # Below 0.5, so that affinity outweighs it; both stay below one length class.
        score = self._length_class + 0.5 * self._pending_work / (1 + self._num_servers) / self._all_work
        own = [wave for wave in self._open.get(replica_id, ()) if self._pending[wave] and wave in self._of_one_adapter]
        score[own] += 0.5
        number, taken = self._replicas.of(replica_id), self._replicas.taken
        score[~np.isin(self._home, list(taken))] += _ABOVE_ALL_CLASSES
        score[self._home == number] += 2 * _ABOVE_ALL_CLASSES
        score[self._is_canary] += 4 * _ABOVE_ALL_CLASSES
        score[self._length_class < 0] = -1.0
        found = self._first_allowed([int(np.argmax(score))], is_allowed)
        if found is None:
            found = self._first_allowed(np.argsort(-score, kind="stable").tolist(), is_allowed)
        if found is not None:
            self.discard(found)
        return found

    def _first_allowed(self, waves: Sequence[int], is_allowed: Callable[[int], bool]) -> int | None:
        for wave in waves:
            for shard_id in reversed(self._pending[wave]):
                if is_allowed(shard_id):
                    return shard_id
        return None

    def put_back(self, shard_id: int) -> None:
        """Queue a shard that was taken again, at its place in the plan's order."""
        self._insert(self._shards[shard_id])

    def discard(self, shard_id: int) -> None:
        """Remove a shard."""
        wave = self._wave(shard_id)
        pending = self._pending[wave]
        if pending[-1] == shard_id:
            pending.pop()
        else:
            pending.remove(shard_id)
        self._num_shards -= 1
        self._pending_work[wave] = self._pending_work[wave] - _work(self._shards[shard_id]) if pending else 0.0
        self._classify(wave)

    def opened(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica."""
        wave = self._wave(shard_id)
        self._replicas.keep(replica_id, self._shards[shard_id].replica)
        self._num_servers[wave] += self._open[replica_id][wave] == 0
        self._open[replica_id][wave] += 1

    def closed(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica no more."""
        wave, waves = self._wave(shard_id), self._open[replica_id]
        waves[wave] -= 1
        if not waves[wave]:
            del waves[wave]
            self._num_servers[wave] -= 1

    def removed(self, replica_id: str) -> None:
        """Drop a replica that has no open shards any more; its number is free again."""
        self._open.pop(replica_id, None)
        self._replicas.free(replica_id)

    def _insert(self, shard: Shard) -> None:
        wave = self._wave(shard.shard_id)
        bisect.insort(self._pending[wave], shard.shard_id, key=lambda s: -self._position[s])
        self._num_shards += 1
        self._pending_work[wave] += _work(shard)
        self._classify(wave)

    def _classify(self, wave: int) -> None:
        """Class of the wave's next shard: the power of two of its rows' mean predicted length; -1 without one."""
        if not self._pending[wave]:
            self._length_class[wave] = -1.0
            return
        shard = self._shards[self._pending[wave][-1]]
        length = self._correction[wave] * shard.predicted_output_tokens / shard.num_rows
        self._length_class[wave] = np.floor(np.log2(max(1.0, length)))

    def correct_length(self, adapter_id: str | None, tokens_per_row: float) -> None:
        """Rank the waves of one adapter by the mean length of its finished rows from now on."""
        for wave, predicted in self._waves_of.get(adapter_id, ()):
            self._correction[wave] = tokens_per_row / max(1.0, predicted)
            self._classify(wave)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the failing sum, when the totals contradict the lists."""
        pending = [self._shards[s] for shard_ids in self._pending for s in shard_ids]
        assert len(pending) == self._num_shards, f"{len(pending)} pending shards, counted {self._num_shards}"
        for wave, shard_ids in enumerate(self._pending):
            work = sum(_work(self._shards[s]) for s in shard_ids)
            assert work == self._pending_work[wave], f"wave {wave}: {work} of work, counted otherwise"
            servers = sum(wave in waves for waves in self._open.values())
            assert servers == self._num_servers[wave], f"wave {wave}: {servers} replicas, counted otherwise"


class DealtShards:
    """Pending shards that were dealt out before the job: a replica opens its own, in the plan's order.

    Replicas get their numbers as they come. A shard that failed or was lost is for whichever replica asks first. Shards
    dealt to a replica that has not come, or is gone, are opened by replicas with nothing else to do, one at a time.
    """

    is_shared: ClassVar[bool] = False

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = {shard.shard_id: shard for shard in shards}
        self._own: defaultdict[int, deque[int]] = defaultdict(deque)
        self._returned: deque[int] = deque()
        self._replicas = _ReplicaNumbers()
        self._num_open: Counter[str] = Counter()
        self._pending: set[int] = set()
        for shard in shards:
            self._own[_owner(shard)].append(shard.shard_id)
            self._pending.add(shard.shard_id)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._pending

    def take(self, replica_id: str, is_allowed: Callable[[int], bool]) -> int | None:
        """Remove and return the shard this replica should open next; None when none is allowed.

        Its own shards come first, then those that were put back. A replica with nothing open also takes the shards of
        absent replicas and, if it has none left of its own, those of any other.
        """
        queues = [self._own[self._replicas.of(replica_id)], self._returned]
        if not self._num_open[replica_id]:
            taken = self._replicas.taken
            orphaned = [self._own[number] for number in sorted(self._own) if number not in taken]
            # With more replicas than shards were dealt to, some have none of their own.
            queues += [*orphaned, *self._own.values()] if not queues[0] else orphaned
        for shards in queues:
            for shard_id in shards:
                if is_allowed(shard_id):
                    self.discard(shard_id)
                    return shard_id
        return None

    def put_back(self, shard_id: int) -> None:
        """Queue a shard that was taken again, for whichever replica asks first."""
        self._returned.append(shard_id)
        self._pending.add(shard_id)

    def discard(self, shard_id: int) -> None:
        """Remove a pending shard."""
        shard = self._shards[shard_id]
        own = self._own[_owner(shard)]
        (own if shard_id in own else self._returned).remove(shard_id)
        self._pending.remove(shard_id)

    def opened(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica."""
        self._replicas.keep(replica_id, _owner(self._shards[shard_id]))
        self._num_open[replica_id] += 1

    def closed(self, shard_id: int, replica_id: str) -> None:
        """Note that a shard is open on a replica no more."""
        self._num_open[replica_id] -= 1

    def removed(self, replica_id: str) -> None:
        """Drop a replica that has no open shards any more; its number is free again."""
        self._replicas.free(replica_id)
        del self._num_open[replica_id]

    def correct_length(self, adapter_id: str | None, tokens_per_row: float) -> None:
        """Do nothing: the order was decided before the job."""

    def check_integrity(self) -> None:
        """Raise AssertionError when queues and pending shards disagree, or a count of open shards is negative."""
        queued = [shard_id for shards in (*self._own.values(), self._returned) for shard_id in shards]
        assert sorted(queued) == sorted(self._pending), f"{len(queued)} shards queued, {len(self._pending)} pending"
        assert min(self._num_open.values(), default=0) >= 0, f"open shards {self._num_open}"


def _placed_wave(shard: Shard) -> tuple[int, int]:
    return shard.wave_id, -1 if shard.replica is None else shard.replica


def _owner(shard: Shard) -> int:
    # Error rows that have work after all, since their adapter was mended, were dealt to no one.
    return shard.replica or 0


def _waves_of_one_adapter(
    shards: Sequence[Shard], number: dict[tuple[int, int], int]
) -> dict[str | None, list[tuple[int, float]]]:
    """Adapter id (None: base model) -> (wave number, predicted output tokens per row) of the waves that it has for
    itself.
    """
    adapters: defaultdict[tuple[int, int], set[tuple[str, ...]]] = defaultdict(set)
    rows: Counter[tuple[int, int]] = Counter()
    tokens: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        wave = _placed_wave(shard)
        adapters[wave].add(shard.adapters)
        rows[wave] += shard.num_rows
        tokens[wave] += shard.predicted_output_tokens
    found: defaultdict[str | None, list[tuple[int, float]]] = defaultdict(list)
    for wave, sets in adapters.items():
        together = next(iter(sets))
        if len(sets) == 1 and len(together) <= 1:
            adapter_id = together[0] if together else None
            found[adapter_id].append((number[wave], tokens[wave] / rows[wave]))
    return dict(found)


def _work(shard: Shard) -> int:
    # At least 1, so that a wave with pending shards is never mistaken for an empty one.
    return 1 + shard.predicted_output_tokens + shard.prompt_tokens // 10


class AdapterSources:
    """Chooses where each replica fetches an adapter: from another replica that has it, before storage.

    This is LoRAServe's distributed pool of adapters (section 4): storage is read once per adapter, not per replica.
    """

    def __init__(self) -> None:
        # Replica -> adapters that it has, or is fetching -> the fetch (None: it has the adapter).
        self._fetches: defaultdict[str, dict[str, AdapterFetch | None]] = defaultdict(dict)
        # Copies that each replica was named for, so that copies are spread over the replicas that have an adapter.
        self._num_copies: Counter[str] = Counter()

    def of_shard(self, replica_id: str, shard: Shard) -> tuple[AdapterFetch, ...]:
        """Fetches of the adapters of a shard that the replica opening it does not have yet.

        An adapter that is still being fetched for an earlier shard keeps its source.
        """
        fetches = self._fetches[replica_id]
        for adapter_id in shard.adapters:
            if adapter_id not in fetches:
                source = self._replica_with(adapter_id)
                if source is not None:
                    self._num_copies[source] += 1
                fetches[adapter_id] = AdapterFetch(adapter_id, source)
            else:
                fetch = fetches[adapter_id]
                if fetch is not None and fetch.from_replica_id not in self._fetches:
                    fetches[adapter_id] = AdapterFetch(adapter_id, None)
        return tuple(fetch for adapter_id in shard.adapters if (fetch := fetches[adapter_id]) is not None)

    def reported(self, replica_id: str, resident: Collection[str]) -> None:
        """Take in what a replica has in memory; it may have fetched some by itself."""
        self._fetches[replica_id] |= dict.fromkeys(resident)

    def removed(self, replica_id: str) -> None:
        """Drop a replica, and its memory with it."""
        self._fetches.pop(replica_id, None)
        self._num_copies.pop(replica_id, None)

    def _replica_with(self, adapter_id: str) -> str | None:
        """The replica to copy an adapter from: one that has it before one that is fetching it, then the one that was
        named least often.
        """
        found = [
            (known[adapter_id] is not None, self._num_copies[replica], replica)
            for replica, known in self._fetches.items()
            if adapter_id in known
        ]
        return min(found)[2] if found else None


def rows_behind(shards: Sequence[Shard], num_replicas: int) -> dict[int, int]:
    """Rows of the same wave that will follow each shard to a replica, by shard id; only of waves planned to run merged.

    A replica learns from them how many rows a merge serves. Shards go out in order, to the replica that they are placed
    on, or to all of `num_replicas` alike. A replica uses the number of the shard it received last.
    """
    behind: dict[int, int] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for shard in reversed(shards):
        if shard.mode == "merged":
            behind[shard.shard_id] = seen[_placed_wave(shard)] // (num_replicas if shard.replica is None else 1)
            seen[_placed_wave(shard)] += shard.num_rows
    return behind
