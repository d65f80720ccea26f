"""Keys and values reach their slots and nothing else changes."""

from __future__ import annotations

import torch

from lorabatch.kernels.kv_write import kv_write
from lorabatch.kernels.kv_write.reference import write
from lorabatch.kernels.lora_qkv import HeadLayout


def test_tokens_are_stored_at_their_slots_and_nowhere_else(dtype: torch.dtype, device: torch.device) -> None:
    layout = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=20, num_layers=3, page_tokens=4)
    packed = torch.randn(5, 8, 20, device=device).to(dtype)  # as in a packed qkv product
    keys, values = packed[:, 4:6], packed[:, 6:]
    slots = torch.tensor([0, 11, -1, 6, 23], dtype=torch.int32, device=device)
    found = torch.full((6 * layout.page_elements,), 7.0, dtype=dtype, device=device)
    expected = found.clone()
    kv_write(keys, values, slots, found, layout, layer=1)
    write(keys, values, slots, expected, layout, layer=1)
    assert torch.equal(found, expected)
    assert int((found != 7.0).sum()) == 4 * 2 * 2 * 20
