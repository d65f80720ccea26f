"""The plain twin of the shrink: the whole sum in the first plane, zeros in the others."""

from __future__ import annotations

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.reference import shrunk_rows
from ..layouts.segments import SPLITS_AT, Segments


def shrink(x: Tensor, table: LoraTable, segments: Segments, scratch: Tensor, layer: int, site: int) -> None:
    """Fill `scratch` with `x A_c^T` of every chunk of every tile: the whole sum in the first plane."""
    num_splits = int(segments.header[SPLITS_AT + site])
    plane_rows = len(scratch) // num_splits
    for row_start, num_rows, plus, minus, scratch_row in segments.tiles_list():
        rows = segments.perm[row_start : row_start + num_rows].long()
        position = 0
        for resident in (plus, minus):
            if resident < 0:
                continue
            for h in shrunk_rows(x[rows], table, (resident, layer, site)):
                if h.shape[1] == 0:
                    continue
                start = scratch_row + position * num_rows
                for split in range(num_splits):
                    plane = scratch[split * plane_rows + start :][:num_rows]
                    plane.zero_()
                    if split == 0:
                        plane[:, : h.shape[1]] = h
                position += 1
