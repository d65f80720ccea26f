"""Decoder layers in one compiled call have the bits of their plain twin, one operator after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lorabatch.kernels.decoder_layers import DecoderLayers, LayerParts, LayerShape
from lorabatch.kernels.decoder_layers.reference import forward
from lorabatch.kernels.native import adapter_type, native_build
from lorabatch.kernels.packed_weight import Products, can_multiply, pack
from lorabatch.kernels.packed_weight.panels import MatrixRows, StoredWeight, pack_matrices_
from lorabatch.kernels.paged_attention.types import SpanTable
from lorabatch.kernels.rotary import rotary_tables
from lorabatch.kernels.segment_lora import AdapterSites, LoraMember, LoraSiteWeights, LoraSpan, PreparedLora

pytestmark = pytest.mark.skipif(native_build() is None, reason="compiled kernels were not built on this machine")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 16, 40, 56
NUM_LAYERS, CAPACITY = 2, 24
# inputs and outputs of a layer's packed linear layers
SITES = [
    (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    (HEADS * HEAD_DIM, HIDDEN),
    (HIDDEN, 2 * INNER),
    (INNER, HIDDEN),
]
# new tokens and stored ones of each sequence: a prompt, a piece of a prompt, decode rows
SPANS = [(5, 0), (3, 7), (1, 20), (1, 1)]
NUM_TOKENS = sum(new for new, _ in SPANS)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def layer_parts(
    products: Products, *, rotary: int | None, window: int | None, has_head_norms: bool, has_sinks: bool
) -> LayerParts:
    linears = []
    for i, (in_features, out_features) in enumerate(SITES):
        weight = pack(random(out_features, in_features), products)
        assert isinstance(weight, StoredWeight)
        linears.append((weight, random(out_features) if i % 2 else None))
    head_norms = [1 + random(HEAD_DIM) if has_head_norms else None for _ in range(2)]
    sinks = random(HEADS) if has_sinks else None
    return LayerParts(linears, 1 + random(HIDDEN), 1 + random(HIDDEN), *head_norms, rotary, window, sinks)


def in_panels(matrix: torch.Tensor) -> torch.Tensor:
    panels = torch.empty(matrix.numel())
    kind = adapter_type(torch.float32, [matrix.shape[1]])
    pack_matrices_(panels, np.array([MatrixRows(0, kind, 0, len(matrix))]), [matrix])
    return panels


def adapter(rank: int) -> AdapterSites:
    """An adapter at each packed layer but the last."""
    sites: list[LoraSiteWeights | None] = []
    for in_features, out_features in SITES * NUM_LAYERS:
        member = LoraMember(0, rank, 0, out_features, (in_panels(random(out_features, rank)),), 0.5)
        sites.append(LoraSiteWeights((in_panels(random(rank, in_features)),), (member,), in_panels=True))
    return AdapterSites.of([*sites[:-1], None])


def tables(spans: Sequence[tuple[int, int, int]]) -> PreparedLora:
    return PreparedLora([LoraSpan(start, end, adapter(rank)) for start, end, rank in spans])


@pytest.mark.parametrize("products", ["float32", "bfloat16", "int8"])
# no adapter, one beside rows of the base, and a second one over the first
@pytest.mark.parametrize("lora", [[], [(2, 7, 3)], [(0, 5, 8), (5, 10, 2), (4, 9, 3)]], ids=str)
@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_layers_have_the_bits_of_their_operators(
    products: Products, lora: list[tuple[int, int, int]], num_layers: int, is_part: bool, stored: torch.dtype
) -> None:
    if not can_multiply(products):
        pytest.skip(f"this processor has no instructions for products in {products}")
    torch.manual_seed(0)
    layers = [
        layer_parts(products, rotary=0, window=None, has_head_norms=True, has_sinks=False),
        layer_parts(products, rotary=None, window=6, has_head_norms=False, has_sinks=True),
    ]
    shape = LayerShape(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, 1e-5, HEAD_DIM**-0.5, 2.0 if is_part else 0.0)
    prepared = tables(lora).tables
    assert prepared is not None
    rotaries = [rotary_tables(torch.randn(NUM_TOKENS, HEAD_DIM // 2), 1.0, torch.float32)]
    extent = NUM_LAYERS * 2 * KV_HEADS * CAPACITY * HEAD_DIM
    rows, kv_rows, first = [], [], 0
    for i, (new, past) in enumerate(SPANS):
        rows.append((first, new, past, i * extent, CAPACITY))
        heads = i * extent // HEAD_DIM + CAPACITY * torch.arange(2 * KV_HEADS)
        kv_rows += [heads + past + token for token in range(new)]
        first += new
    places = torch.stack(kv_rows), torch.full((NUM_TOKENS, 1), 2 * KV_HEADS * CAPACITY)
    spans = SpanTable.of(rows, HEADS // KV_HEADS)
    x, pool = torch.randn(NUM_TOKENS, HIDDEN), torch.randn(len(SPANS) * extent).to(stored)
    expected, expected_pool = x.clone(), pool.clone()
    add_up = (lambda y: y * 2) if is_part else (lambda y: y)
    forward(shape, layers[:num_layers], expected, rotaries, expected_pool, places, spans, prepared, add_up)
    assert num_layers == 0 or not torch.equal(expected, x)
    compiled = DecoderLayers(shape, layers)
    compiled.forward_(x, num_layers, rotaries, pool, places, spans, prepared, add_up if is_part else None)
    assert torch.equal(x, expected)
    assert torch.equal(pool, expected_pool)
