"""Store keys and values of a step in the page pool: for layers whose qkv is not finished by `kernels.lora_qkv`.

`keys`, `values` [num_tokens, K, head_dim]; token t goes to `slots[t]` (page * page_tokens + place), -1 stores
nothing. A page holds `[num_layers, 2 (key, value), K, page_tokens, head_dim]`.
"""

from __future__ import annotations

from torch import Tensor

from ..launch import uses_triton
from ..lora_qkv import HeadLayout


def kv_write(keys: Tensor, values: Tensor, slots: Tensor, pool: Tensor, layout: HeadLayout, layer: int) -> None:
    """Write one layer's keys and values into `pool` (flat). Features must be contiguous; tokens and heads may lie
    apart, as they do in a packed qkv product."""
    shape = (len(slots), layout.num_kv_heads, layout.head_dim)
    for name, tensor in (("keys", keys), ("values", values)):
        assert tensor.shape == shape, f"{name} are {list(tensor.shape)}, expected {list(shape)}"
        assert tensor.stride(2) == 1, f"features of {name} must be contiguous"
    if uses_triton(keys.device):
        from .triton import write
    else:
        from .reference import write
    write(keys, values, slots, pool, layout, layer)
