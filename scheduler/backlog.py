"""Shards that no replica has opened yet, and which of them a replica should open next.

Affinity: a replica goes on with the waves it has open (their adapters are resident) before it starts
another. A new wave is the one with the most pending work per replica already on it, so replicas spread over
the adapters first and help each other later. Within a wave the plan's order holds: longest first.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from .waves import Shard


class Backlog:
    """Pending shards by wave. Shards given at construction are all pending."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = {shard.shard_id: shard for shard in shards}
        self._position = {shard.shard_id: i for i, shard in enumerate(shards)}
        self._pending: defaultdict[int, list[int]] = defaultdict(list)
        self._num_rows = 0
        self._pending_work: Counter[int] = Counter()
        # wave -> replica -> shards of that wave open there; empty entries are removed.
        self._open: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for shard in reversed(shards):
            self._insert(shard)

    def __len__(self) -> int:
        return sum(len(shard_ids) for shard_ids in self._pending.values())

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, shard_id: int) -> bool:
        return shard_id in self._pending.get(self._shards[shard_id].wave_id, ())

    @property
    def num_rows(self) -> int:
        """Rows with engine work in pending shards."""
        return self._num_rows

    def take(self, replica_id: str, is_allowed: Callable[[int], bool]) -> int | None:
        """Remove and return the shard this replica should open next; None when none is allowed."""
        waves = sorted(self._pending, key=lambda wave: self._preference(wave, replica_id))
        for wave in waves:
            for shard_id in reversed(self._pending[wave]):
                if is_allowed(shard_id):
                    self.discard(shard_id)
                    return shard_id
        return None

    def _preference(self, wave: int, replica_id: str) -> tuple[bool, float, int]:
        open_here = self._open.get(wave, Counter())
        return (replica_id not in open_here, -self._pending_work[wave] / (1 + len(open_here)), wave)

    def put_back(self, shard_id: int) -> None:
        """A shard that was taken is pending again, at its place in the plan's order."""
        self._insert(self._shards[shard_id])

    def discard(self, shard_id: int) -> None:
        """A shard is pending no more."""
        shard = self._shards[shard_id]
        pending = self._pending[shard.wave_id]
        pending.remove(shard_id)
        self._num_rows -= _engine_rows(shard)
        self._pending_work[shard.wave_id] -= _work(shard)
        if not pending:
            del self._pending[shard.wave_id], self._pending_work[shard.wave_id]

    def opened(self, shard_id: int, replica_id: str) -> None:
        """A shard is open on a replica."""
        self._open[self._shards[shard_id].wave_id][replica_id] += 1

    def closed(self, shard_id: int, replica_id: str) -> None:
        """A shard is open on a replica no more."""
        replicas = self._open[self._shards[shard_id].wave_id]
        replicas[replica_id] -= 1
        if not replicas[replica_id]:
            del replicas[replica_id]

    def _insert(self, shard: Shard) -> None:
        # Each list is kept in reverse order of the plan, so that the next shard is cheap to remove.
        bisect.insort(self._pending[shard.wave_id], shard.shard_id, key=lambda s: -self._position[s])
        self._num_rows += _engine_rows(shard)
        self._pending_work[shard.wave_id] += _work(shard)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the failing sum, when the totals contradict the lists."""
        pending = [self._shards[s] for shard_ids in self._pending.values() for s in shard_ids]
        num_rows = sum(_engine_rows(shard) for shard in pending)
        assert num_rows == self._num_rows, f"{num_rows} pending rows, counted {self._num_rows}"
        assert all(self._pending.values()), "an empty wave is kept"


def _engine_rows(shard: Shard) -> int:
    return shard.num_rows if shard.has_engine_work else 0


def _work(shard: Shard) -> int:
    return shard.predicted_output_tokens + shard.prompt_tokens // 10
