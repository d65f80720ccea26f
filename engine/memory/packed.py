"""Packs an adapter's matrices into one flat tensor, page by page as the pool is to hold them, so that moving it is a
copy of pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...kernels.launch import empty_pinned
from ...kernels.merge import LoraPair
from ...kernels.native import POOL_TYPES, adapter_type
from ...kernels.packed_weight.panels import IN_COLUMNS, IN_PANELS, IN_ROWS, MatrixRows, has_panels, pack_matrices_
from ..model_config.model import ModelConfig
from ..model_config.partition import Partition
from ..peft import AdapterAudit
from ..peft.cut import cut_pairs
from ..peft.random import RANDOM_DEVIATION, random_seed
from ..peft.weights import AdapterWeights, load_adapter, read_adapter
from .adapter_layout import AdapterLayout, Blocks, PairShape, lay_out

# Layouts whose places are remembered: the adapters of a job have few shapes.
_MAX_LAYOUTS = 32


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
    page_elements: int,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """`pack_adapter` for each member of a group. `device`: device of the leader's pool; the other members' are of the
    same kind.
    """
    cut = [cut_pairs(weights.lora, partition) for partition in partitions]
    layout = lay_out(_shapes_of(cut[0]), partitions[0].shard, page_elements, in_panels=in_panels)
    numbers = empty_pinned(len(cut) * layout.size, dtype, device).view(len(cut), layout.size)
    for of_member, pairs in zip(numbers, cut, strict=True):
        _write(of_member, layout, pairs)
    return PackedAdapter(numbers, layout, weights.head)


def pack_adapter(
    weights: AdapterWeights,
    model: ModelConfig,
    dtype: torch.dtype,
    page_elements: int,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """Stack what packed layers multiply together: per layer and site one A for all members, then each member's B.

    `page_elements`: numbers of a page. `in_panels`: see `AdapterLayout`. `dtype` and `device`: those of the pool that
    the numbers are for. Raises `AdapterRefusedError` for an adapter that is exact by merge only.
    """
    pairs = weights.lora
    layout = lay_out(_shapes_of(pairs), model, page_elements, in_panels=in_panels)
    head = weights.head
    some = next(iter(pairs.values()), None)
    if some is None or some.a.device.type == "cpu":
        numbers = empty_pinned(layout.size, dtype, device)
    else:
        numbers = torch.empty(layout.size, dtype=dtype, device=some.a.device)
    _write(numbers, layout, pairs)
    return PackedAdapter(numbers, layout, head)


def random_packed(
    audit: AdapterAudit, model: ModelConfig, dtype: torch.dtype, page_elements: int, device: torch.device
) -> PackedAdapter:
    """A random adapter as `pack_adapter` would pack one, made where it goes, all numbers at once: its 448 matrices, for
    an 8B, take the host longer than their rows take a GPU. The same each time."""
    layout = lay_out(shapes_of_audit(audit), model, page_elements, in_panels=False)
    generator = torch.Generator(device=device).manual_seed(random_seed(audit))
    numbers = torch.empty(layout.size, dtype=dtype, device=device)
    return PackedAdapter(numbers.normal_(0, RANDOM_DEVIATION, generator=generator), layout)


def read_packed(
    audit: AdapterAudit,
    adapter_id: str,
    model: ModelConfig,
    dtype: torch.dtype,
    page_elements: int,
    *,
    in_panels: bool,
    device: torch.device,
) -> PackedAdapter:
    """`pack_adapter` of an adapter's files, each part while it is read and hashed: it is held packed and not as stored.
    Raises what `read_adapter` and `pack_adapter` raise."""
    if audit.verdict != "exact" or not (has_panels() and dtype in POOL_TYPES):
        weights = load_adapter(audit, "cpu", adapter_id)
        return pack_adapter(weights, model, dtype, page_elements, in_panels=in_panels, device=device)
    of_module = {site.module: site for site in audit.sites}
    layout = lay_out(shapes_of_audit(audit), model, page_elements, in_panels=in_panels)
    destinations = _destinations(layout, dtype)
    of_key: dict[str, list[_Destination]] = {}
    for module, of_pair in destinations.items():
        of_key |= zip((of_module[module].a_key, of_module[module].b_key), of_pair, strict=True)
    assert len(of_key) == 2 * len(destinations), f"{len(of_key)} tensors of {len(destinations)} pairs"
    numbers = empty_pinned(layout.size, dtype, device)
    head_key = None if audit.head is None else audit.head.replaced_by
    heads: list[Tensor] = []

    def pack(part: Mapping[str, Tensor]) -> None:
        heads.extend(tensor.clone() for key, tensor in part.items() if key == head_key)
        _pack(numbers, [(of_key[key], tensor) for key, tensor in part.items() if key in of_key])

    read_adapter(audit, pack, adapter_id)
    return PackedAdapter(numbers, layout, *heads)


def shapes_of_audit(audit: AdapterAudit) -> list[PairShape]:
    """Shapes of an adapter's pairs, as `lay_out` takes them."""
    return [(site.module, site.rank, site.in_features, site.out_features, site.scaling) for site in audit.sites]


def _shapes_of(pairs: Mapping[str, LoraPair]) -> list[PairShape]:
    return [(name, pair.rank, pair.a.shape[1], pair.b.shape[0], pair.scaling) for name, pair in pairs.items()]


def _write(numbers: Tensor, layout: AdapterLayout, pairs: Mapping[str, LoraPair]) -> None:
    """Write the matrices to their places. Compiled kernels do it in this thread alone: torch would start a team of
    threads in every loader thread, and they would take cores from each other and from the thread of the steps."""
    is_compiled = numbers.device.type == "cpu" and has_panels() and numbers.dtype in POOL_TYPES
    if layout.in_panels or is_compiled:
        found = _destinations(layout, numbers.dtype).items()
        _pack(numbers, [pair for m, (a, b) in found for pair in ((a, pairs[m].a), (b, pairs[m].b))])
        return
    for of_layer, views in zip(layout.layers, layout.sites(numbers, np.arange(layout.num_pages)), strict=True):
        for name, site in of_layer.items():
            a = torch.cat([pairs[pair.module].a for pair in site.pairs])
            _fill(views[name].a, a)
            for pair, member in zip(site.pairs, views[name].members, strict=True):
                _fill(member.b, pairs[pair.module].b.t())


def _fill(pieces: Sequence[Tensor], rows: Tensor) -> None:
    first = 0
    for piece in pieces:
        piece.copy_(rows[first : first + len(piece)])
        first += len(piece)


# Place of a part of a matrix as it is stored, the dimension along which the part is cut, its first row or column, and
# how many.
_Destination = tuple[MatrixRows, int, int, int]


def _pack(numbers: Tensor, matrices: Sequence[tuple[Sequence[_Destination], Tensor]]) -> None:
    """Write matrices as they are stored to their destinations in `numbers`."""
    places: list[MatrixRows] = []
    parts: list[Tensor] = []
    for destinations, matrix in matrices:
        for place, dimension, first, count in destinations:
            places.append(place)
            parts.append(matrix if count == matrix.shape[dimension] else matrix.narrow(dimension, first, count))
    pack_matrices_(numbers, np.array(places, np.int64).reshape(-1, len(MatrixRows._fields)), parts)


@lru_cache(maxsize=_MAX_LAYOUTS)
def _destinations(
    layout: AdapterLayout, dtype: torch.dtype
) -> dict[str, tuple[list[_Destination], list[_Destination]]]:
    """Destinations of A and of B of each module."""
    found = {}
    for site in (site for of_layer in layout.layers for site in of_layer.values()):
        depths = (site.in_features, *(pair.rank_end - pair.rank_start for pair in site.pairs))
        kind = adapter_type(dtype, depths) if layout.in_panels else POOL_TYPES[dtype]
        for pair in site.pairs:
            outputs = pair.column_end - pair.column_start
            if layout.in_panels:
                a = _in_blocks(site.a_blocks, kind, IN_PANELS, pair.rank_start, pair.rank_end)
                b = _in_blocks(pair.b_blocks, kind, IN_PANELS, 0, outputs)
            else:
                of_a = _side_by_side(site.a_blocks, site.in_features)
                a = _in_blocks(of_a, kind, IN_ROWS, pair.rank_start, pair.rank_end)
                b = (
                    (MatrixRows(start, kind, 0, outputs, IN_COLUMNS), 1, first, end - first)
                    for first, end, start in _side_by_side(pair.b_blocks, outputs)
                )
            found[pair.module] = list(a), list(b)
    return found


def _in_blocks(blocks: Blocks, kind: int, form: int, first_row: int, end_row: int) -> Iterator[_Destination]:
    """Destinations of a matrix that is rows of a larger one."""
    for first, end, start in blocks:
        row, last = max(first, first_row), min(end, end_row)
        if row < last:
            yield MatrixRows(start, kind, row - first, end - first, form), 0, row - first_row, last - row


def _side_by_side(blocks: Blocks, width: int) -> Blocks:
    """Blocks of rows, those that lie side by side as one."""
    joined: list[tuple[int, int, int]] = []
    for first, end, start in blocks:
        if joined and joined[-1][2] + (first - joined[-1][0]) * width == start:
            joined[-1] = joined[-1][0], end, joined[-1][2]
        else:
            joined.append((first, end, start))
    return tuple(joined)
