"""Rotation and storing of a step's heads, against the formula pair by pair in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.rotary import rotary_tables, rotate_and_store_, rotate_and_store_by_torch_

TOKENS, HEADS, KV_HEADS = 5, 4, 2


@pytest.mark.parametrize("form", [rotate_and_store_, rotate_and_store_by_torch_])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (64, 64), (80, 32), (12, 6), (32, None)])
def test_queries_and_keys_turn_and_keys_and_values_find_their_places(
    form: Callable[..., None], head_dim: int, rotated: int | None
) -> None:
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, head_dim)
    expected = qkv.double()
    rotary = None
    if rotated is not None:
        angles = torch.randn(TOKENS, rotated // 2)
        rotary = rotary_tables(angles, 1.0, torch.float32)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        turning = expected[:, : HEADS + KV_HEADS].clone()
        first, second = turning[..., : rotated // 2], turning[..., rotated // 2 : rotated]
        expected[:, : HEADS + KV_HEADS, : rotated // 2] = first * cos - second * sin
        expected[:, : HEADS + KV_HEADS, rotated // 2 : rotated] = second * cos + first * sin
    kv_rows = torch.randperm(40)[: TOKENS * 2 * KV_HEADS].view(TOKENS, 2 * KV_HEADS)
    pool = torch.full((40 * head_dim,), 7.0)
    form(qkv, rotary, pool, kv_rows, HEADS)
    assert (qkv.double() - expected).abs().max() < 1e-6
    places = pool.view(40, head_dim)
    assert torch.equal(places[kv_rows], qkv[:, HEADS:])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[kv_rows.flatten()] = False
    assert (places[untouched] == 7.0).all(), "a place of another token changed"
