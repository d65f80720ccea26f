"""LoRA shrink: `H[tile, c] = x[rows of the tile] A_c^T` for every chunk of every tile's adapters.

`x` [num_tokens, in_features]; the result goes to scratch planes, fp32, as `kernels.layouts.segments` says. The sum is
split over planes that the expand adds up in a fixed order: no atomics, nothing to clear.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.segments import Segments


def lora_shrink(x: Tensor, table: LoraTable, segments: Segments, scratch: Tensor, layer: int, site: int) -> None:
    """Fill `scratch` (from `segments.allocate_scratch()`) for one layer and packed site. Rows are contiguous."""
    assert x.dtype == table.pool.dtype, f"x is {x.dtype}, the pool {table.pool.dtype}"
    assert x.stride(1) == 1, "rows of x must be contiguous"
    from .triton import shrink

    shrink(x, table, segments, scratch, layer, site)
