"""Attends for all sequences of a step in one compiled call per layer (`cpu.c`): no groups, masks or copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, NUMBER, POOL_TYPES, native_function
from .types import SpanTable

_LANES = 16  # of the widest vectors


def can_attend_compiled(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves heads of this kind, in a pool of `dtype`, on this machine's processor."""
    return dtype in POOL_TYPES and head_dim % _LANES == 0 and _compiled() is not None


def attend_spans(
    q: Tensor,
    pool: Tensor,
    table: SpanTable,
    layer: int,
    num_kv_heads: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend `q` [T, H, D] (rows evenly spaced, heads dense) to the pool (flat, fp32 or bf16); returns [T, H * D].
    `sinks`: [H], fp32.
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1, "a head must be dense"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    compiled = _compiled()
    assert compiled is not None, "compiled kernels are not there"
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), "compiled kernels take fp32"
    per_kv = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads * head_dim)
    compiled(
        out.data_ptr(), q.data_ptr(), q.stride(0), pool.data_ptr(), POOL_TYPES[pool.dtype], table.rows.ctypes.data,
        table.block_starts.ctypes.data, len(table.rows), table.block_tokens, layer, num_kv_heads, per_kv, head_dim,
        window or 0, scale, softcap or 0.0, None if sinks is None else sinks.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _compiled() -> Callable[..., None] | None:
    places = (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS)
    return native_function("attend_spans", *places, *(COUNT,) * 7, NUMBER, NUMBER, ADDRESS, COUNT)
