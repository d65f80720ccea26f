"""Packs an adapter's matrices into one flat tensor, in the layout of the page pool, so that moving it is one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.launch import empty_pinned
from ...kernels.merge import LoraPair
from ...kernels.native import POOL_TYPES, adapter_type
from ...kernels.native.segments import moved
from ...kernels.packed_weight.panels import IN_COLUMNS, IN_PANELS, IN_ROWS, MatrixRows, has_panels, pack_matrices_
from ...kernels.segment_lora import AdapterSites, LoraMember, LoraSiteWeights, site_records
from ..model_config.model import PACKED_SITES, ModelConfig, packed_members
from ..model_config.partition import Partition
from ..peft import AdapterAudit
from ..peft.cut import cut_pairs
from ..peft.random import RANDOM_DEVIATION, random_seed
from ..peft.weights import AdapterWeights, load_adapter, read_adapter

# Layouts that are remembered: the adapters of a job have few shapes.
_MAX_LAYOUTS = 32
Sites = tuple[dict[str, LoraSiteWeights], ...]  # per layer, by packed site


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Place of one linear layer's pair within the packed site that it adds to."""

    #: Name of the linear layer.
    module: str
    #: First row of the pair's A in the stacked A of the site.
    rank_start: int
    #: Row behind the last one.
    rank_end: int
    #: First output of the site that the pair adds to.
    column_start: int
    #: Output behind the last one.
    column_end: int
    #: First number of the pair's B, which has `rank_end - rank_start` by `column_end - column_start`.
    b_start: int
    #: Factor of the pair's product.
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
    """Places of an adapter's matrices in a flat tensor, counted in numbers from the adapter's first one.

    `layers`: by packed site. `in_panels`: matrices are stored as compiled CPU kernels read them; otherwise as rows of A
    and of B's transpose, one by one. `num_elements`: numbers of all matrices.
    """

    layers: tuple[dict[str, SiteLayout], ...] = ()
    in_panels: bool = False
    num_elements: int = 0

    def sites(self, numbers: Tensor) -> Sites:
        """The matrices as views of `numbers` (flat), the adapter and nothing else."""
        return tuple({name: self._site(site, numbers) for name, site in layer.items()} for layer in self.layers)

    def all_sites(self, numbers: Tensor) -> AdapterSites:
        """`sites` in one row, layer after layer, in the order of `PACKED_SITES`; compiled kernels read `numbers` by
        address."""

        def in_order() -> list[LoraSiteWeights | None]:
            return [of_layer.get(site) for of_layer in self.sites(numbers) for site in PACKED_SITES]

        table = moved(_records_from_zero(self, numbers.dtype), numbers.data_ptr()) if self.in_panels else None
        return AdapterSites(in_order, table)

    def negated(self) -> AdapterLayout:
        """The layout with negative scaling."""

        def negated(site: SiteLayout) -> SiteLayout:
            return replace(site, pairs=tuple(replace(pair, scaling=-pair.scaling) for pair in site.pairs))

        layers = ({name: negated(site) for name, site in layer.items()} for layer in self.layers)
        return AdapterLayout(tuple(layers), self.in_panels, self.num_elements)

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


@lru_cache(maxsize=_MAX_LAYOUTS)
def _records_from_zero(layout: AdapterLayout, dtype: torch.dtype) -> NDArray[np.void]:
    """Records that compiled kernels read of an adapter, with addresses as if its numbers began at address 0."""
    unread = torch.empty(layout.num_elements, dtype=dtype)
    sites = [of_layer.get(site) for of_layer in layout.sites(unread) for site in PACKED_SITES]
    return moved(site_records(sites), -unread.data_ptr())


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """`numbers`: flat, in host memory (pinned where a GPU is to have them), or on the device where they were made up
    there; for a group [num_members, numbers of each], all in the same layout."""

    numbers: Tensor
    layout: AdapterLayout
    #: Head of a classifier as its file has it, [num_labels, embedding_size]; None where there is none, or it is kept
    #: elsewhere already.
    head: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size()


def pack_for_members(
    weights: AdapterWeights,
    partitions: Sequence[Partition],
    dtype: torch.dtype,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """`pack_adapter` for each member of a group. `device`: device of the leader's pool; the other members' are of the
    same kind.
    """
    cut = [cut_pairs(weights.lora, partition) for partition in partitions]
    layout = _layout_of(cut[0], partitions[0].shard, in_panels)
    numbers = empty_pinned(len(cut) * layout.num_elements, dtype, device).view(len(cut), layout.num_elements)
    for of_member, pairs in zip(numbers, cut, strict=True):
        _write(of_member, layout, pairs)
    return PackedAdapter(numbers, layout, weights.head)


def pack_adapter(
    weights: AdapterWeights, model: ModelConfig, dtype: torch.dtype, *, in_panels: bool, device: torch.device
) -> PackedAdapter:
    """Stack what packed layers multiply together: per layer and site one A for all members, then each member's B.

    `in_panels`: see `AdapterLayout`. `dtype` and `device`: those of the pool that the numbers are for. Raises
    `AdapterRefusedError` for an adapter that is exact by merge only.
    """
    pairs = weights.lora
    layout = _layout_of(pairs, model, in_panels)
    head = weights.head
    some = next(iter(pairs.values()), None)
    if some is None or some.a.device.type == "cpu":
        numbers = empty_pinned(layout.num_elements, dtype, device)
    else:
        numbers = torch.empty(layout.num_elements, dtype=dtype, device=some.a.device)
    _write(numbers, layout, pairs)
    return PackedAdapter(numbers, layout, head)


def random_packed(audit: AdapterAudit, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> PackedAdapter:
    """A random adapter as `pack_adapter` would pack one, made where it goes, all numbers at once: its 448 matrices, for
    an 8B, take the host longer than their rows take a GPU. The same each time."""
    layout = _layout_of_sites(audit, model, in_panels=False)
    generator = torch.Generator(device=device).manual_seed(random_seed(audit))
    numbers = torch.empty(layout.num_elements, dtype=dtype, device=device)
    return PackedAdapter(numbers.normal_(0, RANDOM_DEVIATION, generator=generator), layout)


def read_packed(
    audit: AdapterAudit,
    adapter_id: str,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """`pack_adapter` of an adapter's files, each part while it is read and hashed: it is held packed and not as stored.
    Raises what `read_adapter` and `pack_adapter` raise."""
    if audit.verdict != "exact" or not (has_panels() and dtype in POOL_TYPES):
        weights = load_adapter(audit, "cpu", adapter_id)
        return pack_adapter(weights, model, dtype, in_panels=in_panels, device=device)
    of_module = {site.module: site for site in audit.sites}
    layout = _layout_of_sites(audit, model, in_panels)
    places, modules = _places(layout, dtype)
    keys = [key for module in modules for key in (of_module[module].a_key, of_module[module].b_key)]
    place_of = {key: number for number, key in enumerate(keys)}
    assert len(place_of) == len(places), f"{len(place_of)} tensors of {len(places)} matrices"
    numbers = empty_pinned(layout.num_elements, dtype, device)
    head_key = None if audit.head is None else audit.head.replaced_by
    heads: list[Tensor] = []

    def pack(part: Mapping[str, Tensor]) -> None:
        heads.extend(tensor.clone() for key, tensor in part.items() if key == head_key)
        packed = [key for key in part if key in place_of]
        pack_matrices_(numbers, places[[place_of[key] for key in packed]], [part[key] for key in packed])

    read_adapter(audit, pack, adapter_id)
    return PackedAdapter(numbers, layout, *heads)


def _layout_of(pairs: Mapping[str, LoraPair], model: ModelConfig, in_panels: bool) -> AdapterLayout:
    shapes = ((module, pair.rank, pair.a.shape[1], pair.b.shape[0], pair.scaling) for module, pair in pairs.items())
    return _lay_out(frozenset(shapes), model, in_panels)


def _layout_of_sites(audit: AdapterAudit, model: ModelConfig, in_panels: bool) -> AdapterLayout:
    shapes = ((site.module, site.rank, site.in_features, site.out_features, site.scaling) for site in audit.sites)
    return _lay_out(frozenset(shapes), model, in_panels)


def _write(numbers: Tensor, layout: AdapterLayout, pairs: Mapping[str, LoraPair]) -> None:
    """Write the matrices to their places. Compiled kernels do it in this thread alone: torch would start a team of
    threads in every loader thread, and they would take cores from each other and from the thread of the steps."""
    is_compiled = numbers.device.type == "cpu" and has_panels() and numbers.dtype in POOL_TYPES
    if layout.in_panels or is_compiled:
        places, modules = _places(layout, numbers.dtype)
        pack_matrices_(numbers, places, [part for m in modules for part in (pairs[m].a, pairs[m].b)])
        return
    for of_layer, views in zip(layout.layers, layout.sites(numbers), strict=True):
        for name, site in of_layer.items():
            _fill(views[name], [pairs[pair.module] for pair in site.pairs])


@lru_cache(maxsize=_MAX_LAYOUTS)
def _lay_out(shapes: frozenset[tuple[str, int, int, int, float]], model: ModelConfig, in_panels: bool) -> AdapterLayout:
    """The layout of an adapter. `shapes`: module, rank, inputs, outputs and scaling of each pair. Adapters of equal
    shapes share one layout.
    """
    pairs = {module: (rank, inputs, outputs, scaling) for module, rank, inputs, outputs, scaling in shapes}
    layers: list[dict[str, SiteLayout]] = []
    cursor = 0
    for layer in range(model.num_layers):
        of_layer: dict[str, SiteLayout] = {}
        for site in PACKED_SITES:
            members = [m for m in packed_members(model, layer, site) if m.module in pairs]
            if not members:
                continue
            a_start, in_features = cursor, pairs[members[0].module][1]
            cursor += in_features * sum(pairs[m.module][0] for m in members)
            packed, rank_start = [], 0
            for m in members:
                rank, _, out_features, scaling = pairs[m.module]
                packed.append(PairLayout(m.module, rank_start, rank_start + rank, m.start, m.end, cursor, scaling))
                cursor, rank_start = cursor + rank * out_features, rank_start + rank
            of_layer[site] = SiteLayout(a_start, in_features, tuple(packed))
        layers.append(of_layer)
    size = sum(rank * (inputs + outputs) for _, rank, inputs, outputs, _ in shapes)
    assert size == cursor, f"laid out {cursor} of {size} numbers"
    return AdapterLayout(tuple(layers), in_panels, cursor)


@lru_cache(maxsize=_MAX_LAYOUTS)
def _places(layout: AdapterLayout, dtype: torch.dtype) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Destinations of A and B of each module, int64 [2 * num_modules, 5] (`MatrixRows`), and the modules in the same
    order.
    """
    places: list[MatrixRows] = []
    modules: list[str] = []
    a_form, b_form = (IN_PANELS, IN_PANELS) if layout.in_panels else (IN_ROWS, IN_COLUMNS)
    for site in (site for of_layer in layout.layers for site in of_layer.values()):
        depths = (site.in_features, *(pair.rank_end - pair.rank_start for pair in site.pairs))
        kind = adapter_type(dtype, depths) if layout.in_panels else POOL_TYPES[dtype]
        for pair in site.pairs:
            modules.append(pair.module)
            places.append(MatrixRows(site.a_start, kind, pair.rank_start, site.rank, a_form))
            out_features = pair.column_end - pair.column_start
            places.append(MatrixRows(pair.b_start, kind, 0, out_features, b_form))
    return np.array(places, dtype=np.int64).reshape(-1, len(MatrixRows._fields)), tuple(modules)


def _fill(site: LoraSiteWeights, pairs: list[LoraPair]) -> None:
    for member, pair in zip(site.members, pairs, strict=True):
        site.a[member.rank_start : member.rank_end].copy_(pair.a)
        member.b.copy_(pair.b.t())
