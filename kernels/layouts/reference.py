"""Plain twins of the parts that LoRA operators share: one row and one chunk at a time, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from .lora_table import LoraTable
from .segments import SPLITS_AT, Segments


def shrunk_rows(x: Tensor, table: LoraTable, place: tuple[int, int, int]) -> list[Tensor]:
    """`x A_c^T` for every chunk of one (resident, layer, site), each fp64 [len(x), num_rows]."""
    first, count = table.sites[place].tolist()[:2]
    shrunk = []
    for a_offset, _, num_rows, _, _ in table.chunks[first : first + count].tolist():
        a = table.pool[a_offset : a_offset + num_rows * x.shape[1]].view(num_rows, x.shape[1])
        shrunk.append(x.double() @ a.double().t())
    return shrunk


def expanded(
    y: Tensor, bias: Tensor | None, table: LoraTable, segments: Segments, scratch: Tensor, layer: int, site: int
) -> Tensor:
    """`factor * (y + signed chunks) + biases`, fp64 [num_tokens, out_features]; LoRA's first half from `scratch`."""
    result = y.double().clone()
    num_splits = int(segments.header[SPLITS_AT + site])
    planes = scratch[: len(scratch) // num_splits * num_splits].view(num_splits, -1, scratch.shape[1])
    for row_start, num_rows, plus, minus, scratch_row in segments.tiles_list():
        for m in range(num_rows):
            row = result[int(segments.perm[row_start + m])]
            _expand_row(row, (plus, minus), table, planes[:, scratch_row + m :: num_rows], (layer, site))
    return result if bias is None else result + bias.double()


def _expand_row(
    y: Tensor, residents: tuple[int, int], table: LoraTable, shrunk: Tensor, place: tuple[int, int]
) -> None:
    """Expand a row's chunks, those of `plus` and then of `minus`. `shrunk`: the row's products, by split and chunk."""
    plus, minus = residents
    position = 0
    biases = torch.zeros_like(y)
    for resident, sign in ((plus, 1.0), (minus, -1.0)):
        if resident < 0:
            continue
        first, count, _, bias_offset = table.sites[(resident, *place)].tolist()[:4]
        for index in range(first, first + count):
            _, b_offset, num_rows, start, width = table.chunks[index].tolist()
            h = shrunk[:, position, :num_rows].double().sum(0)
            b = table.pool[b_offset : b_offset + num_rows * width].view(num_rows, width).double()
            y[start : start + width] += sign * float(table.scales[index]) * (h @ b)
            position += 1
        if bias_offset >= 0:
            biases += sign * table.pool_fp32[bias_offset : bias_offset + len(y)].double()
    if plus >= 0 and (at := int(table.sites[plus, place[0], place[1], 2])) >= 0:
        y *= table.pool_fp32[at : at + len(y)].double()
    y += biases
