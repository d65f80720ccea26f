"""Offline placement as a problem: shards, the adapters they need, replicas, and how soon the last may end at best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """What is to be placed. `adapters_of`: per shard, the adapters it needs. `speed`: 1.0 is the cost
    model's.
    """

    shard_s: NDArray[np.float64]
    adapters_of: tuple[tuple[int, ...], ...]
    load_s: NDArray[np.float64]
    speed: NDArray[np.float64]

    @property
    def num_shards(self) -> int:
        """Shards to place."""
        return len(self.shard_s)

    @property
    def num_replicas(self) -> int:
        """Replicas to place them on."""
        return len(self.speed)

    def end_s(self, shards: NDArray[np.int64], replica: int) -> float:
        """When a replica ends that runs these shards."""
        needed = {adapter for shard in shards for adapter in self.adapters_of[shard]}
        loads = sum(float(self.load_s[adapter]) for adapter in sorted(needed))
        return float(self.shard_s[shards].sum() / self.speed[replica]) + loads

    def finish_s(self, replica_of: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[num_replicas]`: when each replica ends under a placement."""
        return np.array(
            [self.end_s(np.flatnonzero(replica_of == replica), replica) for replica in range(self.num_replicas)]
        )

    def lower_bound_s(self) -> float:
        """No placement ends sooner.

        The largest shard alone; or all work and all loads spread evenly, where an adapter whose work does not fit
        into one replica by that time is loaded on as many as it takes. The second is found by bisection.
        """
        if self.num_shards == 0:
            return 0.0
        alone = max(
            seconds / self.speed.max() + self.load_s[list(adapters)].sum()
            for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True)
        )
        low, high = float(alone), float(alone + self.end_s(np.arange(self.num_shards), int(np.argmin(self.speed))))
        work_of = self.work_of_adapters()
        if self._may_end_by(low, work_of):
            return low
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._may_end_by(middle, work_of) else (middle, high)
        return low

    def work_of_adapters(self) -> NDArray[np.float64]:
        """`[num_adapters]`: seconds of the shards that need each."""
        work = np.zeros(len(self.load_s))
        for seconds, adapters in zip(self.shard_s, self.adapters_of, strict=True):
            work[list(adapters)] += seconds
        return work

    def _may_end_by(self, end_s: float, work_of: NDArray[np.float64]) -> bool:
        """Necessary for any placement that ends by then. A fast replica loads no faster than a slow one."""
        used = work_of > 0
        room = self.speed.max() * (end_s - self.load_s[used])
        if (room <= 0).any():
            return False
        copies = np.ceil(work_of[used] / room - 1e-9)
        loads = float((copies * self.load_s[used]).sum()) * float(self.speed.min())
        return bool(self.shard_s.sum() + loads <= end_s * self.speed.sum() * (1 + 1e-12))
