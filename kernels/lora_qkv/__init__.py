"""The end of qkv: LoRA, biases, q/k norm, rotary embedding, and keys and values straight into the page pool.

`y` [num_tokens, (H + 2K) * D] is the packed base product without bias: H query heads, K key heads, K value heads
of D = head_dim. Query heads are finished in place; keys and values go to the pool only. Rotation is that of
`kernels.rotary`, on the first `2 * cos.shape[1]` features of a head; the rest pass (partial rotary; none for OPT).
Norms over a head (Qwen3, Gemma 3): `x / sqrt(mean(x^2) + eps) * (weight + norm_offset)`, offset 1 for Gemma.
"""

from __future__ import annotations

from torch import Tensor

from ..layouts.lora_table import LoraTable
from ..layouts.pages import PageLayout
from ..layouts.segments import Segments
from .types import HeadFinish

__all__ = ["HeadFinish", "lora_qkv_"]


def lora_qkv_(
    y: Tensor,
    finish: HeadFinish,
    layout: PageLayout,
    table: LoraTable,
    segments: Segments,
    scratch: Tensor,
    layer: int,
) -> Tensor:
    """Finish `y`'s queries in place and return them as a view [num_tokens, H, D]; store keys and values in
    `table.pool`. `scratch` must hold the shrink of the same layer's qkv."""
    heads = layout.num_heads + 2 * layout.num_kv_heads
    assert y.shape[1] == heads * layout.head_dim, f"y has {y.shape[1]} columns, {heads} heads of {layout.head_dim}"
    assert y.is_contiguous(), "y must be contiguous"
    assert (finish.q_norm is None) == (finish.k_norm is None), "q_norm and k_norm come together"
    from .triton import qkv

    qkv(y, finish, layout, table, segments, scratch, layer)
    return y.view(len(y), heads, layout.head_dim)[:, : layout.num_heads]
