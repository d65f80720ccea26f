"""The plain twin of `kv_write`: one token at a time."""

from __future__ import annotations

from torch import Tensor

from ..lora_qkv import HeadLayout


def write(keys: Tensor, values: Tensor, slots: Tensor, pool: Tensor, layout: HeadLayout, layer: int) -> None:
    """See `kv_write`."""
    num_pages = len(pool) // layout.page_elements
    pages = pool[: num_pages * layout.page_elements].view(
        num_pages, layout.num_layers, 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim
    )
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, layout.page_tokens)
            pages[page, layer, 0, :, place] = keys[token]
            pages[page, layer, 1, :, place] = values[token]
