"""Packs an adapter's matrices into one flat tensor, in the layout of the page pool, so that moving it is one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.launch import empty_pinned
from ...kernels.native import adapter_type
from ...kernels.packed_weight.panels import pack_rows_
from ...kernels.segment_lora import LoraMember, LoraSiteWeights
from ..model_config.model import PACKED_SITES, ModelConfig, packed_members
from ..model_config.partition import Partition
from ..peft.cut import cut_pairs
from ..peft.weights import AdapterWeights, LoraPair

Sites = tuple[dict[str, LoraSiteWeights], ...]  # per layer, by packed site


@dataclass(frozen=True, slots=True)
class PairLayout:
    """One linear layer's pair: its rows of the stacked A, the columns of the packed site that it adds to, and where its
    B of `rank_end - rank_start` by `column_end - column_start` numbers begins."""

    module: str
    rank_start: int
    rank_end: int
    column_start: int
    column_end: int
    b_start: int
    scaling: float


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """One packed site of one layer: where its stacked A [sum of ranks, in_features] begins, and its pairs."""

    a_start: int
    in_features: int
    pairs: tuple[PairLayout, ...]

    @property
    def rank(self) -> int:
        """Rows of the stacked A."""
        return self.pairs[-1].rank_end


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """Where an adapter's matrices lie in a flat tensor, counted in numbers from where the adapter begins.

    `layers`: by packed site. `in_panels`: as compiled CPU kernels read them; otherwise rows of A and of B's transpose,
    one by one.
    """

    layers: tuple[dict[str, SiteLayout], ...] = ()
    in_panels: bool = False

    def sites(self, numbers: Tensor) -> Sites:
        """The matrices as views of `numbers` (flat), the adapter and nothing else."""
        return tuple({name: self._site(site, numbers) for name, site in layer.items()} for layer in self.layers)

    def negated(self) -> AdapterLayout:
        """The same matrices with negative scaling: added to merged weights they leave those of the base model."""

        def negated(site: SiteLayout) -> SiteLayout:
            return replace(site, pairs=tuple(replace(pair, scaling=-pair.scaling) for pair in site.pairs))

        layers = ({name: negated(site) for name, site in layer.items()} for layer in self.layers)
        return AdapterLayout(tuple(layers), self.in_panels)

    def _site(self, site: SiteLayout, numbers: Tensor) -> LoraSiteWeights:
        members = []
        for pair in site.pairs:
            b = self._matrix(
                numbers, pair.b_start, pair.rank_end - pair.rank_start, pair.column_end - pair.column_start
            )
            places = (pair.rank_start, pair.rank_end, pair.column_start, pair.column_end)
            members.append(LoraMember(*places, b, pair.scaling))
        a = self._matrix(numbers, site.a_start, site.rank, site.in_features)
        return LoraSiteWeights(a, tuple(members), self.in_panels)

    def _matrix(self, numbers: Tensor, start: int, num_rows: int, width: int) -> Tensor:
        start += int(numbers.storage_offset())
        if self.in_panels:
            return numbers.as_strided((num_rows * width,), (1,), start)
        return numbers.as_strided((num_rows, width), (width, 1), start)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """`numbers`: flat, in host memory (pinned where a GPU is to have them), or on the device where they were made up
    there; for a group [num_members, numbers of each], all in the same layout."""

    numbers: Tensor
    layout: AdapterLayout

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size()


def pack_for_group(
    weights: AdapterWeights,
    partitions: Sequence[Partition],
    dtype: torch.dtype,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """`pack_adapter` for each member of a group. `device`: of the leader's memory, and likewise of the others'."""
    pairs, host = weights.lora, torch.device("cpu")
    packed = [
        _pack(cut_pairs(pairs, partition), partition.shard, dtype, in_panels=in_panels, device=host)
        for partition in partitions
    ]
    num_elements = packed[0].numbers.numel()
    numbers = empty_pinned(len(packed) * num_elements, dtype, device).view(len(packed), num_elements)
    return PackedAdapter(torch.stack([each.numbers for each in packed], out=numbers), packed[0].layout)


def pack_adapter(
    weights: AdapterWeights, model: ModelConfig, dtype: torch.dtype, *, in_panels: bool, device: torch.device
) -> PackedAdapter:
    """Stack what packed layers multiply together: per layer and site one A for all members, then each member's B.

    `in_panels`: see `AdapterLayout`. `dtype` and `device`: of the memory where they are to go. Raises
    `AdapterRefusedError` for an adapter that is exact by merge only.
    """
    return _pack(weights.lora, model, dtype, in_panels=in_panels, device=device)


def _pack(
    pairs: Mapping[str, LoraPair], model: ModelConfig, dtype: torch.dtype, *, in_panels: bool, device: torch.device
) -> PackedAdapter:
    num_elements = sum(pair.a.numel() + pair.b.numel() for pair in pairs.values())
    some = next(iter(pairs.values()), None)
    if some is None or some.a.device.type == "cpu":
        numbers = empty_pinned(num_elements, dtype, device)
    else:
        numbers = torch.empty(num_elements, dtype=dtype, device=some.a.device)
    layout, size = _lay_out(pairs, model, in_panels)
    assert size == num_elements, f"packed {size} of {num_elements} numbers"
    for of_layer, views in zip(layout.layers, layout.sites(numbers), strict=True):
        for name, site in of_layer.items():
            _fill(views[name], [pairs[pair.module] for pair in site.pairs])
    return PackedAdapter(numbers, layout)


def _lay_out(pairs: Mapping[str, LoraPair], model: ModelConfig, in_panels: bool) -> tuple[AdapterLayout, int]:
    """The layout, and how many numbers it takes."""
    layers: list[dict[str, SiteLayout]] = []
    cursor = 0
    for layer in range(model.num_layers):
        of_layer: dict[str, SiteLayout] = {}
        for site in PACKED_SITES:
            members = [m for m in packed_members(model, layer, site) if m.module in pairs]
            if not members:
                continue
            a_start, in_features = cursor, pairs[members[0].module].a.shape[1]
            cursor += in_features * sum(pairs[m.module].rank for m in members)
            packed, rank_start = [], 0
            for m in members:
                pair = pairs[m.module]
                rank_end = rank_start + pair.rank
                packed.append(PairLayout(m.module, rank_start, rank_end, m.start, m.end, cursor, pair.scaling))
                cursor, rank_start = cursor + pair.b.numel(), rank_end
            of_layer[site] = SiteLayout(a_start, in_features, tuple(packed))
        layers.append(of_layer)
    return AdapterLayout(tuple(layers), in_panels), cursor


def _fill(site: LoraSiteWeights, pairs: list[LoraPair]) -> None:
    stacked_rank = sum(pair.rank for pair in pairs)
    kind = adapter_type(site.a.dtype, (pairs[0].a.shape[1], *(p.rank for p in pairs))) if site.in_panels else 0
    for member, pair in zip(site.members, pairs, strict=True):
        if site.in_panels:
            pack_rows_(site.a, kind, member.rank_start, stacked_rank, pair.a)
            pack_rows_(member.b, kind, 0, pair.b.shape[0], pair.b)
        else:
            site.a[member.rank_start : member.rank_end].copy_(pair.a)
            member.b.copy_(pair.b.t())
