"""Rotation and storing of a step's heads, and the plain twin, against the formula pair by pair in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.native import native_build
from lorabatch.kernels.rotary import rotary_tables, rotate_and_store_
from lorabatch.kernels.rotary.reference import rotate

TOKENS, HEADS, KV_HEADS = 5, 4, 2
# Tokens lie in runs of different sizes, so that layers are not equally far apart.
LAYER, STRIDES = 3, torch.tensor([2, 0, 5, 1, 2])[:, None]


def places_before(kv_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places whose rows in the layer are `kv_rows`."""
    return kv_rows - LAYER * STRIDES, STRIDES


@pytest.mark.parametrize("form", [rotate_and_store_, rotate])
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
    form(qkv, rotary, pool, places_before(kv_rows), LAYER, HEADS)
    assert (qkv.double() - expected).abs().max() < 1e-6
    places = pool.view(40, head_dim)
    assert torch.equal(places[kv_rows], qkv[:, HEADS:])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[kv_rows.flatten()] = False
    assert (places[untouched] == 7.0).all(), "a place of another token changed"


@pytest.mark.skipif(native_build() is None, reason="compiled kernels were not built on this machine")
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_keys_and_values_are_rounded_to_a_pool_in_bf16(head_dim: int) -> None:
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, head_dim) * 10.0 ** torch.randint(-30, 30, (1, 1, head_dim))
    odd = [torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0, 1e-42, 1.00390625, 1.01171875]  # halves to even
    qkv[0, HEADS, : len(odd)] = torch.tensor(odd)
    qkv[1, HEADS, :2] = torch.tensor([0x7FFFFFFF, 0x7F800001]).to(torch.int32).view(torch.float32)
    kv_rows = torch.randperm(40)[: TOKENS * 2 * KV_HEADS].view(TOKENS, 2 * KV_HEADS)
    pool = torch.full((40 * head_dim,), 7.0, dtype=torch.bfloat16)
    rotate_and_store_(qkv, None, pool, places_before(kv_rows), LAYER, HEADS)
    assert torch.allclose(pool.view(40, head_dim)[kv_rows], qkv[:, HEADS:].bfloat16(), rtol=0, atol=0, equal_nan=True)
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[kv_rows.flatten()] = False
    assert (pool.view(40, head_dim)[untouched] == 7.0).all()
