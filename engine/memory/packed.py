"""Packs an adapter's matrices into one flat tensor, in the layout of the page pool, so that moving it is one copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.launch import empty_pinned
from ...kernels.native import adapter_type
from ...kernels.packed_weight.panels import pack_rows_
from ...kernels.segment_lora import LoraMember, LoraSiteWeights
from ..model_config.model import PACKED_SITES, ModelConfig, PackedMember, packed_members
from ..peft.weights import AdapterWeights, LoraPair

Sites = tuple[dict[str, LoraSiteWeights], ...]  # per layer, by packed site


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """`numbers`: flat, in host memory (pinned where a GPU is to have them), or on the device where they were made up
    there. `sites`: views into it."""

    numbers: Tensor
    sites: Sites

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size()

    def sites_at(self, memory: Tensor, start: int) -> Sites:
        """The views of a copy of the numbers at `memory[start:]` (flat)."""
        return _moved(self.sites, memory, start)


def pack_adapter(
    weights: AdapterWeights, model: ModelConfig, dtype: torch.dtype, *, in_panels: bool, device: torch.device
) -> PackedAdapter:
    """Stack what packed layers multiply together: per layer and site one A for all members, then each member's B.

    `in_panels`: as compiled CPU kernels read them; otherwise rows of A and of B's transpose one by one.
    `dtype` and `device`: of the memory where they are to go. Raises `AdapterRefusedError` for an adapter that is exact
    by merge only.
    """
    pairs = weights.lora
    some = next(iter(pairs.values()), None)
    num_elements = sum(pair.a.numel() + pair.b.numel() for pair in pairs.values())
    if some is None or some.a.device.type == "cpu":
        numbers = empty_pinned(num_elements, dtype, device)
    else:
        numbers = torch.empty(num_elements, dtype=dtype, device=some.a.device)
    cursor = 0
    layers = []
    for layer in range(model.num_layers):
        of_layer: dict[str, LoraSiteWeights] = {}
        for site in PACKED_SITES:
            members = [(m, pairs[m.module]) for m in packed_members(model, layer, site) if m.module in pairs]
            if members:
                of_layer[site] = _pack_site(members, numbers, cursor, in_panels)
                cursor += sum(pair.a.numel() + pair.b.numel() for _, pair in members)
        layers.append(of_layer)
    assert cursor == num_elements, f"packed {cursor} of {num_elements} numbers"
    return PackedAdapter(numbers, tuple(layers))


def packed_from(numbers: Tensor, start: int, sites: Sites) -> PackedAdapter:
    """A copy of the pool's numbers from `start` on, with views `sites`."""
    return PackedAdapter(numbers, _moved(sites, numbers, -start))


def _pack_site(
    members: list[tuple[PackedMember, LoraPair]], numbers: Tensor, cursor: int, in_panels: bool
) -> LoraSiteWeights:
    stacked_rank, in_features = sum(pair.rank for _, pair in members), members[0][1].a.shape[1]
    stack = numbers[cursor : cursor + stacked_rank * in_features]
    a = stack if in_panels else stack.view(stacked_rank, in_features)
    cursor += a.numel()
    panels_type = adapter_type(numbers.dtype, (in_features, *(pair.rank for _, pair in members))) if in_panels else 0
    rank_start, packed = 0, []
    for member, pair in members:
        rank_end, out_features = rank_start + pair.rank, pair.b.shape[0]
        b = numbers[cursor : cursor + pair.b.numel()]
        if in_panels:
            pack_rows_(a, panels_type, rank_start, stacked_rank, pair.a)
            pack_rows_(b, panels_type, 0, out_features, pair.b)
        else:
            a[rank_start:rank_end].copy_(pair.a)
            b = b.view(pair.rank, out_features)
            b.copy_(pair.b.t())
        cursor += b.numel()
        packed.append(LoraMember(rank_start, rank_end, member.start, member.end, b, pair.scaling))
        rank_start = rank_end
    return LoraSiteWeights(a, tuple(packed), in_panels)


def _moved(sites: Sites, memory: Tensor, distance: int) -> Sites:
    """The same views, `distance` elements further into `memory`."""

    def moved(view: Tensor) -> Tensor:
        return memory.as_strided(view.shape, view.stride(), int(view.storage_offset()) + distance)

    def moved_member(m: LoraMember) -> LoraMember:
        # steps wait for this: `dataclasses.replace` takes three times as long
        return LoraMember(m.rank_start, m.rank_end, m.column_start, m.column_end, moved(m.b), m.scaling)

    return tuple(
        {
            site: LoraSiteWeights(moved(w.a), tuple(map(moved_member, w.members)), w.in_panels)
            for site, w in layer.items()
        }
        for layer in sites
    )
