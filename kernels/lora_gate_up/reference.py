"""The plain twin of `lora_gate_up`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, silu

from ..layouts.lora_table import GATE_UP, LoraTable
from ..layouts.reference import expanded
from ..layouts.segments import Segments


def gate_up(
    out: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: str,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> None:
    """Write `act(gate) * up` to `out` [num_tokens, intermediate], with LoRA and biases, in fp64."""
    gate, up = expanded(y, bias, table, segments, scratch, layer, GATE_UP).chunk(2, dim=1)
    out.copy_((silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up)
