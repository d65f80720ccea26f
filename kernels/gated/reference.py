"""The plain twin of `silu_gate`, for every device and dtype."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def gate(packed: Tensor) -> Tensor:
    """`silu(gate) * up`, [num_tokens, inner], from gate beside up in `packed` [num_tokens, 2 * inner]."""
    gated, up = packed.chunk(2, dim=-1)
    return silu(gated).mul_(up)
