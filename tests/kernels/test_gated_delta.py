"""The gated delta rule against transformers' layer, and compiled against its plain twin."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from lorabatch.kernels.gated_delta import DeltaParameters, DeltaRows, DeltaSizes, gated_delta
from lorabatch.kernels.gated_delta.reference import walk
from lorabatch.kernels.gated_delta.triton import walk_by_triton
from lorabatch.kernels.native import native_build

FORMS = [gated_delta, walk]
SIZES = [DeltaSizes(2, 4, 8, 12, 4), DeltaSizes(1, 1, 33, 70, 2), DeltaSizes(3, 6, 128, 128, 4)]


def layer_of(sizes: DeltaSizes, hidden_size: int = 24) -> Qwen3_5GatedDeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=hidden_size,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_size,
        linear_value_head_dim=sizes.value_size,
        linear_conv_kernel_dim=sizes.taps,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        for parameter in (*layer.parameters(),):
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def parameters_of(layer: Qwen3_5GatedDeltaNet) -> DeltaParameters:
    conv = layer.conv1d.weight[:, 0].T.contiguous()
    return DeltaParameters(
        conv.detach(), layer.A_log.detach(), layer.dt_bias.detach(), layer.norm.weight.detach(), 1e-6
    )


def projected_of(layer: Qwen3_5GatedDeltaNet, x: Tensor) -> Tensor:
    parts = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    return torch.cat([part(x) for part in parts], -1)


def rows_of(lengths: list[int], sizes: DeltaSizes, is_new: bool = True) -> DeltaRows:
    places = [3 + slot * (sizes.state_elements + 5) for slot in reversed(range(len(lengths)))]
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return DeltaRows(torch.tensor(ends), torch.tensor(places), torch.full((len(lengths),), is_new))


def memory_for(num_rows: int, sizes: DeltaSizes) -> Tensor:
    return torch.full((3 + num_rows * (sizes.state_elements + 5),), torch.nan)


def random_case(sizes: DeltaSizes, num_tokens: int) -> tuple[Tensor, DeltaParameters]:
    torch.manual_seed(num_tokens)
    parameters = DeltaParameters(
        torch.randn(sizes.taps, sizes.channels),
        torch.randn(sizes.value_heads),
        torch.randn(sizes.value_heads),
        torch.randn(sizes.value_size),
        1e-6,
    )
    return torch.randn(num_tokens, sizes.projected), parameters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@torch.no_grad()
def test_rows_of_any_length_equal_transformers(form: type[gated_delta], sizes: DeltaSizes) -> None:
    torch.manual_seed(1)
    layer = layer_of(sizes)
    lengths = [1, 70, 3, 128]
    texts = [torch.randn(1, length, 24) for length in lengths]
    projected = projected_of(layer, torch.cat(texts, 1)[0])
    states = memory_for(4, sizes)
    out = form(projected, sizes, parameters_of(layer), states, rows_of(lengths, sizes))
    found = torch.split(layer.out_proj(out), lengths)
    for text, mine in zip(texts, found, strict=True):
        expected = layer(text)[0]
        assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert states.isnan().sum() == 3 + 4 * 5, "memory between the rows' was written"


@pytest.mark.skipif(native_build() is None, reason="compiled kernels were not built on this machine")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_bits_depend_neither_on_chunks_nor_on_other_rows(sizes: DeltaSizes, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 40))
    projected, parameters = random_case(sizes, num_tokens)
    states = memory_for(1, sizes)
    whole = gated_delta(projected.clone(), sizes, parameters, states, rows_of([num_tokens], sizes))
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(0, num_tokens), max_size=5))})
    beside = data.draw(st.integers(0, 5))
    pieces, memory = [], memory_for(2, sizes)
    for start, end in pairwise(cuts):
        rows = rows_of([beside, end - start], sizes)
        rows.is_new[1] = start == 0
        tokens = torch.cat([torch.randn(beside, sizes.projected), projected[start:end]])
        pieces.append(gated_delta(tokens, sizes, parameters, memory, rows)[beside:])
    assert torch.equal(torch.cat(pieces), whole)
    kept = sizes.state_elements
    assert torch.equal(memory[3 : 3 + kept], states[3 : 3 + kept])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiled_equals_its_plain_twin(sizes: DeltaSizes) -> None:
    projected, parameters = random_case(sizes, 50)
    lengths = [20, 1, 0, 29]
    rows, states, twins = rows_of(lengths, sizes), memory_for(4, sizes), memory_for(4, sizes)
    expected = walk(projected.clone(), sizes, parameters, twins, rows)
    found = gated_delta(projected, sizes, parameters, states, rows)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert torch.allclose(states, twins, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_gates_and_decays_far_from_zero_stay_finite() -> None:
    sizes = SIZES[0]
    projected, parameters = random_case(sizes, 12)
    projected *= 60
    expected = walk(projected.clone(), sizes, parameters, memory_for(1, sizes), rows_of([12], sizes))
    found = gated_delta(projected, sizes, parameters, memory_for(1, sizes), rows_of([12], sizes))
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_triton_equals_the_plain_twin_and_bits_do_not_depend_on_chunks(device: torch.device, sizes: DeltaSizes) -> None:
    projected, parameters = random_case(sizes, 14)
    lengths = [9, 1, 0, 4]
    rows, states, twins = rows_of(lengths, sizes), memory_for(4, sizes), memory_for(4, sizes)
    expected = walk(projected.clone(), sizes, parameters, twins, rows)

    def on_device(tokens: Tensor, rows: DeltaRows, states: Tensor) -> Tensor:
        moved = DeltaRows(*(t.to(device) for t in (rows.first_tokens, rows.places, rows.is_new)))
        weights = (parameters.conv, parameters.decay_log, parameters.step_bias, parameters.norm)
        there = DeltaParameters(*(t.to(device) for t in weights), parameters.eps)
        return walk_by_triton(tokens.to(device), sizes, there, states, moved)

    states = states.to(device)
    found = on_device(projected, rows, states)
    assert (found.cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert torch.allclose(states.cpu(), twins, rtol=1e-4, atol=1e-4, equal_nan=True)
    memory, pieces = memory_for(1, sizes).to(device), []
    for start, end in ((0, 1), (1, 3), (3, 9)):
        pieces.append(on_device(projected[start:end], rows_of([end - start], sizes, start == 0), memory))
    assert torch.equal(torch.cat(pieces), found[:9])
