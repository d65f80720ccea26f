"""Computes the gated activation of the Llama families, `silu(gate) * up` with silu(x) = x / (1 + e^-x), and outputs of
attention times the sigmoid of a gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .reference import gate


def silu_gate(packed: Tensor) -> Tensor:
    """`silu(gate) * up`, [num_tokens, inner], from gate beside up in `packed` [num_tokens, 2 * inner]."""
    is_served = packed.device.type == "cpu" and packed.dtype == torch.float32 and packed.is_contiguous()
    compiled = native_function("silu_gate", ADDRESS, ADDRESS, COUNT, COUNT) if is_served else None
    if compiled is None:
        return gate(packed)
    num_tokens, inner = packed.shape[0], packed.shape[1] // 2
    out = torch.empty(num_tokens, inner)
    compiled(out.data_ptr(), packed.data_ptr(), num_tokens, inner)
    return out


def sigmoid_gate_(heads: Tensor, gate: Tensor) -> Tensor:
    """`heads` [num_tokens, num_heads, size] times the sigmoid of `gate`, of the same shape and any strides but the
    last; in place.
    """
    tensors = (heads, gate)
    is_served = all(t.device.type == "cpu" and t.dtype == torch.float32 and t.stride(-1) == 1 for t in tensors)
    arguments = (ADDRESS, ADDRESS, *(COUNT,) * 5)
    compiled = native_function("sigmoid_gate", *arguments) if is_served and heads.is_contiguous() else None
    if compiled is None:
        return heads.mul_(gate.sigmoid())
    compiled(heads.data_ptr(), gate.data_ptr(), gate.stride(0), gate.stride(1), *heads.shape)
    return heads
