"""The plain twin of `lora_residual_`."""

from __future__ import annotations

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.reference import expanded
from ..layouts.segments import Segments


def add_residual(
    out: Tensor,
    y: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
    site: int,
) -> None:
    """Write `residual + factor * (y + LoRA) + biases` to `out` [num_tokens, out_features], in fp64."""
    value = expanded(y, bias, table, segments, scratch, layer, site)
    out.copy_(value if residual is None else value + residual.double())
