"""KV write on a GPU. One program per token and key head: it moves 2 x 128 x 2 = 512 bytes each way, four full cache
lines, in one warp of 16 bytes a lane. 512 tokens x 8 heads are 4096 programs of one warp, 31 on a multiprocessor."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..lora_qkv import HeadLayout


@triton.jit(do_not_specialize=["layer"])
def _write(
    keys, values, slots, pool, layer, page_elements, key_token, key_head, value_token, value_head,
    K: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < tl.where(slot >= 0, HEAD_DIM, 0)
    k = tl.load(keys + token * key_token + head * key_head + dims, mask=inside, other=0.0)
    v = tl.load(values + token * value_token + head * value_head + dims, mask=inside, other=0.0)
    in_page = (layer * 2 * K + head) * (PAGE * HEAD_DIM) + (slot % PAGE) * HEAD_DIM
    at = pool + (slot // PAGE) * page_elements + in_page + dims
    tl.store(at, k, mask=inside)
    tl.store(at + K * PAGE * HEAD_DIM, v, mask=inside)


def write(keys: Tensor, values: Tensor, slots: Tensor, pool: Tensor, layout: HeadLayout, layer: int) -> None:
    """See `kv_write`."""
    _write[(len(slots), layout.num_kv_heads)](
        keys, values, slots, pool, layer, layout.page_elements, keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), K=layout.num_kv_heads, HEAD_DIM=layout.head_dim,
        PAGE=layout.page_tokens, BLOCK_D=triton.next_power_of_2(layout.head_dim), num_warps=1,
    )  # fmt: skip
