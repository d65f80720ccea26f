"""The end of a row-parallel linear layer (o, down): `out = residual + factor * (y + LoRA) + biases`, in place.

`y` [num_tokens, out_features] is the layer's base product without bias, `residual` the stream it joins (None when
a norm is between them: then `y` is overwritten). LoRA comes from scratch; see `kernels.layouts.lora_table`.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.segments import Segments


def lora_residual_(
    y: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
    site: int,
) -> Tensor:
    """Add into `residual` and return it (or into `y`). `scratch` must hold the same layer's and site's shrink."""
    out = y if residual is None else residual
    assert out.shape == y.shape, f"residual is {list(out.shape)}, y {list(y.shape)}"
    assert y.is_contiguous(), "y must be contiguous"
    assert out.is_contiguous(), "the residual must be contiguous"
    from .triton import add_residual

    add_residual(out, y, residual, bias, table, segments, scratch, layer, site)
    return out
