"""The end of gate_up: `out = act(gate) * up`, with `[gate, up] = factor * (y + LoRA) + biases`.

`y` [num_tokens, 2 * intermediate] is the packed base product without bias, `out` [num_tokens, intermediate].
Activations: `silu` and `gelu_tanh` (the tanh form of GELU).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.segments import Segments

Activation = Literal["silu", "gelu_tanh"]


def lora_gate_up(
    y: Tensor,
    bias: Tensor | None,
    activation: Activation,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> Tensor:
    """New tensor [num_tokens, intermediate]. `scratch` must hold the shrink of the same layer's gate_up."""
    assert y.is_contiguous(), "y must be contiguous"
    assert y.shape[1] % 2 == 0, f"gate and up are of one size, y has {y.shape[1]} columns"
    out = y.new_empty(y.shape[0], y.shape[1] // 2)
    from .triton import gate_up

    gate_up(out, y, bias, activation, table, segments, scratch, layer)
    return out
