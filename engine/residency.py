"""Which adapters lie in the page pool, and who must leave to make room.

The engine knows its waiting rows, hence each adapter's next use: the one needed furthest in the future leaves
first (Belady 1966). Adapters of running sequences are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from ..kernels.segment_lora import LoraMember, LoraSiteWeights
from .adapter.weights import AdapterWeights
from .config import ModelConfig
from .model_config import PACKED_SITES
from .packed_sites import packed_members
from .pool import PagePool, PageRun


@dataclass(frozen=True, slots=True, eq=False)
class ResidentAdapter:
    """An adapter's matrices as views into the pool: per layer, packed site -> stacked A and the members' B.

    `order` numbers residents by arrival; steps sort their tokens by it.
    """

    adapter_id: str
    order: int
    sites: tuple[dict[str, LoraSiteWeights], ...]


@dataclass(frozen=True, slots=True, eq=False)
class MergedShare:
    """A merged adapter for rows that must not see it: `negative` has the same matrices and negative scaling, and
    added to merged weights leaves those of the base model."""

    resident: ResidentAdapter
    negative: ResidentAdapter

    @classmethod
    def of(cls, resident: ResidentAdapter) -> MergedShare:
        """The share of an adapter that lies in the pool."""
        layers = ({site: _negated(weights) for site, weights in layer.items()} for layer in resident.sites)
        return cls(resident, replace(resident, sites=tuple(layers)))


def _negated(weights: LoraSiteWeights) -> LoraSiteWeights:
    return replace(weights, members=tuple(replace(member, scaling=-member.scaling) for member in weights.members))


class AdapterResidency:
    """Loads adapters into runs of pages of `memory` (flat) and evicts them by next use.

    `stacks_by_rank`: the numbers of one row of A lie side by side, as GPU kernels read them; otherwise those of one
    input feature, as CPU kernels do.
    """

    def __init__(
        self, pool: PagePool, memory: Tensor, page_elements: int, model: ModelConfig, *, stacks_by_rank: bool
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._page_elements = page_elements
        self._model = model
        self._stacks_by_rank = stacks_by_rank
        self._residents: dict[str, ResidentAdapter] = {}
        self._pins: dict[str, int] = {}
        self.num_loads = 0

    @property
    def resident_ids(self) -> tuple[str, ...]:
        """Adapters in the pool, oldest first."""
        return tuple(self._residents)

    def get(self, adapter_id: str) -> ResidentAdapter | None:
        """The adapter if it is resident."""
        return self._residents.get(adapter_id)

    def pin(self, adapter_id: str) -> None:
        """One more running sequence uses the adapter."""
        self._pins[adapter_id] = self._pins.get(adapter_id, 0) + 1

    def unpin(self, adapter_id: str) -> None:
        """One running sequence less uses the adapter."""
        self._pins[adapter_id] -= 1
        if not self._pins[adapter_id]:
            del self._pins[adapter_id]

    def make_room(self, has_room: Callable[[], bool], next_use: Callable[[str], float], keep: str | None) -> bool:
        """Evict unpinned adapters, the one used furthest in the future first, until `has_room()`."""
        while not has_room():
            evictable = [a for a in self._residents if a not in self._pins and a != keep]
            if not evictable:
                return False
            self.evict(max(evictable, key=next_use))
        return True

    def evict(self, adapter_id: str) -> None:
        """Give the adapter's pages back. It must not be pinned."""
        assert adapter_id not in self._pins, f"adapter {adapter_id} is used by {self._pins[adapter_id]} sequences"
        del self._residents[adapter_id]
        self._pool.release(("adapter", adapter_id))

    def load(self, adapter_id: str, weights: AdapterWeights, num_pages: int) -> ResidentAdapter | None:
        """Copy an adapter into the pool, or return None when no run of pages is long enough."""
        run = self._pool.allocate(("adapter", adapter_id), num_pages)
        if run is None:
            return None
        resident = ResidentAdapter(adapter_id, self.num_loads, self._copy_in(weights, run))
        self.num_loads += 1
        self._residents[adapter_id] = resident
        return resident

    def check_integrity(self, running_adapter_ids: Iterable[str]) -> None:
        """Pins equal the running sequences' adapters; every resident holds a run of pages."""
        counts: dict[str, int] = {}
        for adapter_id in running_adapter_ids:
            counts[adapter_id] = counts.get(adapter_id, 0) + 1
        assert counts == self._pins, f"pins {self._pins}, running sequences use {counts}"
        for adapter_id in self._residents:
            self._pool.run_of(("adapter", adapter_id))
        missing = self._pins.keys() - self._residents.keys()
        assert not missing, f"pinned but not resident: {missing}"

    def _copy_in(self, weights: AdapterWeights, run: PageRun) -> tuple[dict[str, LoraSiteWeights], ...]:
        cursor = run.start * self._page_elements
        sites: list[dict[str, LoraSiteWeights]] = []
        for layer in range(self._model.num_layers):
            of_layer: dict[str, LoraSiteWeights] = {}
            for site in PACKED_SITES:
                present = [
                    (member, weights.lora[member.module])
                    for member in packed_members(self._model, layer, site)
                    if member.module in weights.lora
                ]
                if not present:
                    continue
                rank_start = 0
                members = []
                stacked_rank = sum(pair.a.shape[0] for _, pair in present)
                in_features = present[0][1].a.shape[1]
                a = self._matrix(cursor, stacked_rank, in_features)
                cursor += a.numel()
                for member, pair in present:
                    rank, out_features = pair.a.shape[0], pair.b.shape[0]
                    a[rank_start : rank_start + rank].copy_(pair.a)
                    b = self._memory[cursor : cursor + rank * out_features].view(rank, out_features)
                    b.copy_(pair.b.t())
                    cursor += b.numel()
                    columns = (member.start, member.end)
                    members.append(LoraMember(rank_start, rank_start + rank, *columns, b, pair.scaling))
                    rank_start += rank
                of_layer[site] = LoraSiteWeights(a, tuple(members))
            sites.append(of_layer)
        limit = run.end * self._page_elements
        assert cursor <= limit, f"adapter took {cursor} elements, its pages end at {limit}"
        return tuple(sites)

    def _matrix(self, start: int, rank: int, in_features: int) -> Tensor:
        """A view for a stacked A, [rank, in_features], laid out as the kernels that will read it want it."""
        numbers = self._memory[start : start + rank * in_features]
        return numbers.view(rank, in_features) if self._stacks_by_rank else numbers.view(in_features, rank).t()
