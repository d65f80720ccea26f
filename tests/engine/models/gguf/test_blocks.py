"""Weights in the blocks of GGUF files have, to the bit, the numbers that the library `gguf` gives."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from lorabatch.engine.models.gguf.blocks import KINDS, GgufWeight, joined, pack_joined
from lorabatch.kernels.packed_weight import Products, can_multiply, can_widen_blocks
from lorabatch.kernels.packed_weight.blocks import BlockWeight
from lorabatch.kernels.packed_weight.panels import PanelWeight

# Where each kind has its factors in fp16; all other bytes are codes and small scales, and may be anything.
FACTORS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_weight(kind: str, out_features: int = 37, in_features: int = 768) -> GgufWeight:
    rng = np.random.default_rng(list(KINDS).index(kind))
    group, group_bytes, _ = KINDS[kind]
    raw = rng.integers(0, 256, (out_features, in_features // group, group_bytes), dtype=np.uint8)
    for place in FACTORS.get(kind, (0,)):
        factors = rng.normal(0, 0.1, raw.shape[:2]).astype(np.float16)
        raw[..., place : place + 2] = factors[..., None].view(np.uint8)
    return GgufWeight(torch.from_numpy(raw.reshape(out_features, -1)), kind)


def expected(weight: GgufWeight) -> torch.Tensor:
    return torch.from_numpy(dequantize(weight.raw.numpy(), GGMLQuantizationType[weight.kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_library(kind: str) -> None:
    weight = random_weight(kind)
    assert weight.shape == (37, 768)
    assert weight.dense().equal(expected(weight))


@pytest.mark.parametrize(("first", "second"), list(product(KINDS, KINDS)))
def test_weights_of_two_kinds_are_packed_as_one(first: str, second: str) -> None:
    parts = [random_weight(first), random_weight(second)]
    packed = pack_joined(parts, "float32")
    assert isinstance(packed, BlockWeight) == can_widen_blocks("float32")
    assert packed.dense().equal(torch.cat(list(map(expected, parts))))


@pytest.mark.skipif(not can_widen_blocks("float32"), reason="compiled kernels were not built on this machine")
@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 0.57), ("Q4_1", 0.63), ("Q8_0", 1.07), ("Q4_K", 0.76), ("Q6_K", 1.26)]
)
def test_packed_blocks_take_little_memory(kind: str, most: float) -> None:
    packed = pack_joined([random_weight(kind, 64, 768)], "float32")
    assert isinstance(packed, BlockWeight)
    assert packed.numbers.nbytes / (64 * 768) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_blocks_beside_plain_weights_are_packed_as_these_are(dtype: torch.dtype) -> None:
    plain, quantised = torch.randn(5, 768).to(dtype), random_weight("Q5_K")
    packed = pack_joined([plain, quantised], "float32")
    assert packed.dense().equal(torch.cat([plain, expected(quantised).to(dtype)]).float())
    if isinstance(packed, PanelWeight):
        assert packed.numbers.dtype == dtype


def test_one_weight_is_not_copied() -> None:
    weight = torch.randn(5, 768)
    assert joined([weight]) is weight


def test_large_weights_are_widened_some_rows_at_a_time() -> None:
    weight = random_weight("Q4_K", 6000)
    assert weight.shape[0] * weight.shape[1] > 1 << 22
    assert weight.dense(torch.float16).equal(expected(weight).half())


@pytest.mark.parametrize("products", ["bfloat16", "int8"])
def test_other_products_have_their_own_format(products: Products) -> None:
    if not can_multiply(products):
        pytest.skip(f"this processor has no instructions for products in {products}")
    weight = random_weight("Q4_K")
    dense = pack_joined([weight], products).dense()
    assert not dense.equal(expected(weight))
    assert torch.allclose(dense, expected(weight), atol=float(expected(weight).abs().max()) / 100)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (torch.zeros(2, 18, dtype=torch.uint8), "Q4_2"),
        (torch.zeros(2, 17, dtype=torch.uint8), "Q4_0"),
        (torch.zeros(18, dtype=torch.uint8), "Q4_0"),
        (torch.zeros(2, 18), "Q4_0"),
        (torch.zeros(2, 18, dtype=torch.uint8), ["Q4_0"]),
    ],
    ids=["unknown kind", "half a block", "one row", "numbers", "a list"],
)
def test_other_bytes_are_refused(raw: torch.Tensor, kind: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        GgufWeight.of_file(raw, kind)
