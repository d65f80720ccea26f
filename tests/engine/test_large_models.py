"""Llama-3-8B, Qwen2.5-7B and Llama-3.2-1B by their shapes alone: nothing is allocated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_2_1B, LLAMA_3_8B, QWEN_2_5_7B, ModelShape
from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.memory.limits import (
    CpuMemory,
    EngineLimits,
    cpu_limits,
    cpu_memory,
    engine_limits,
    gpu_limits,
    gpu_pool_bytes,
    has_room_to_merge,
    live_weight_bytes,
    step_bytes,
    weight_bytes,
)
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.models.gpu_decoder import GpuDecoder
from lorabatch.engine.models.load import dummy_weights, stored_shapes
from lorabatch.engine.peft.random import dummy_audit

H200_BYTES = 139 << 30
BF16 = torch.bfloat16.itemsize


def model_of(shape: ModelShape) -> ModelConfig:
    return parse_model_config(shape.config_json(), {})


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [(LLAMA_3_8B, 8_030_261_248), (QWEN_2_5_7B, 7_615_616_512), (LLAMA_3_2_1B, 1_235_814_400)],
    ids=lambda value: value.name if isinstance(value, ModelShape) else "",
)
def test_parameters_are_as_many_as_the_published_models_have(shape: ModelShape, num_parameters: int) -> None:
    assert sum(math.prod(sizes) for sizes in stored_shapes(model_of(shape)).values()) == num_parameters


@pytest.mark.parametrize("shape", [LLAMA_3_8B, QWEN_2_5_7B, LLAMA_3_2_1B], ids=lambda shape: shape.name)
def test_the_decoder_takes_random_weights_of_these_shapes(shape: ModelShape) -> None:
    model, meta = model_of(shape), torch.device("meta")
    decoder = GpuDecoder(model, dummy_weights(model, torch.bfloat16, meta), torch.bfloat16, products=None)
    layer = decoder.layers[-1].linears
    packed = {site: tuple(linear.pristine.shape) for site, linear in layer.items()}
    expected = [(sum(members), in_features) for in_features, members in shape.sites]
    assert list(packed.values()) == expected
    assert (layer["qkv"].bias is not None) == (shape is QWEN_2_5_7B)


def test_the_memory_of_an_8b_engine_on_an_h200() -> None:
    model = model_of(LLAMA_3_8B)
    config = EngineConfig(max_batch_rows=256, max_step_tokens=8192, pool_bytes=1 << 34)
    layout = page_layout(model, config.page_tokens, BF16)
    assert layout.page_elements * BF16 == 2 << 20, "a page of 16 tokens is 2 MiB"
    assert cpu_limits(0, config, model, BF16).num_pages == 1 << 13
    sites = dummy_audit(model, 16, "x").sites
    adapter_bytes = sum(site.rank * (site.in_features + site.out_features) for site in sites) * BF16
    assert adapter_bytes == 83_886_080, "a rank-16 adapter is 80 MiB: 40 pages, nothing padded"
    weight_bytes = sum(math.prod(sizes) for sizes in stored_shapes(model).values()) * BF16
    assert live_weight_bytes(model, BF16) == 32 * LLAMA_3_8B.layer_weights * BF16
    step = step_bytes(config.batch_rows, config.step_tokens, model, BF16)
    assert step < 2 << 30
    copy_bytes = live_weight_bytes(model, BF16)
    pool = gpu_pool_bytes(H200_BYTES - weight_bytes, copy_bytes, step)
    assert 90 << 30 < pool < H200_BYTES - weight_bytes - copy_bytes
    assert gpu_pool_bytes(H200_BYTES - weight_bytes, 0, step) == pool + copy_bytes


def test_a_card_that_holds_the_weights_and_little_else_has_no_pool() -> None:
    model = model_of(LLAMA_3_8B)
    step = step_bytes(64, 512, model, BF16)
    assert gpu_pool_bytes(10 << 30, live_weight_bytes(model, BF16), step) == 0


@pytest.mark.parametrize(
    ("shape", "card_gib", "batch_rows", "step_tokens"),
    [
        (LLAMA_3_8B, 139, 512, 16384),  # 117 GiB free after weights and copies: 938 rows of 1024 tokens
        (LLAMA_3_8B, 78, 320, 16384),
        (LLAMA_3_8B, 39, 64, 8192),  # 22 GiB beside the weights: a step of 16384 takes 2.0 GiB
        (LLAMA_3_2_1B, 139, 512, 16384),
        (LLAMA_3_2_1B, 7, 64, 2048),
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else str(value),
)
def test_a_card_s_memory_decides_how_many_rows_and_tokens_a_step_has(
    shape: ModelShape, card_gib: int, batch_rows: int, step_tokens: int
) -> None:
    model = model_of(shape)
    weight_bytes = sum(math.prod(sizes) for sizes in stored_shapes(model).values()) * BF16
    free = (card_gib << 30) - weight_bytes
    found = gpu_limits(free, EngineConfig(), model, BF16)
    assert (found.batch_rows, found.step_tokens) == (batch_rows, step_tokens)
    assert step_bytes(64, step_tokens, model, BF16) <= free / 16
    largest = step_bytes(batch_rows, step_tokens, model, BF16)
    assert found.pool_bytes == gpu_pool_bytes(free, live_weight_bytes(model, BF16), largest)
    assert found.token_bytes == 2 * model.num_layers * model.attention.kv_size * BF16
    assert batch_rows == 64 or batch_rows * 1024 * found.token_bytes <= found.pool_bytes


@pytest.mark.parametrize("mode", ["unmerged", "exact"])
def test_modes_that_choose_no_merge_keep_no_memory_for_it(mode: Mode) -> None:
    model = model_of(LLAMA_3_8B)
    free = (40 << 30) - weight_bytes(model, BF16)
    of_auto, limits = (gpu_limits(free, EngineConfig(mode=each), model, BF16) for each in ("auto", mode))
    largest = step_bytes(limits.batch_rows, limits.step_tokens, model, BF16)
    assert limits.pool_bytes == gpu_pool_bytes(free, 0, largest) > 2 * of_auto.pool_bytes
    assert limits.batch_rows == 128


@pytest.mark.parametrize(("card_gib", "has_room"), [(39, False), (78, True), (139, True)])
def test_a_card_has_room_to_merge_where_the_copy_takes_a_third_of_what_weights_leave(
    card_gib: int, has_room: bool
) -> None:
    assert has_room_to_merge(card_gib << 30, model_of(LLAMA_3_8B), BF16) == has_room


def test_what_is_asked_for_stays() -> None:
    model = model_of(LLAMA_3_8B)
    asked = EngineConfig(max_batch_rows=7, max_step_tokens=100, pool_bytes=1 << 30)
    for found in (gpu_limits(100 << 30, asked, model, BF16), cpu_limits(100 << 30, asked, model, BF16)):
        assert (found.batch_rows, found.step_tokens, found.pool_bytes) == (7, 100, 1 << 30)
    by_pool = gpu_limits(100 << 30, EngineConfig(pool_bytes=1 << 34), model, BF16)
    assert by_pool.batch_rows == 128, "16 GiB hold 128 rows of 1024 tokens of 128 KiB"


def test_a_folder_of_shapes_can_be_read_like_any_other(tmp_path: Path) -> None:
    from lorabatch.engine.config import read_model_config
    from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

    folder = write_model_folder(tmp_path / "model", LLAMA_3_2_1B)
    assert read_model_config(folder) == model_of(LLAMA_3_2_1B)
    assert Tokenizer.from_folder(folder).decode([7, 128_255]).split() == ["7", "128255"]


@pytest.mark.parametrize("shape", [LLAMA_3_8B, QWEN_2_5_7B, LLAMA_3_2_1B], ids=lambda shape: shape.name)
def test_plans_count_the_weights_that_an_engine_loads(shape: ModelShape) -> None:
    model = model_of(shape)
    stored = sum(math.prod(sizes) for sizes in stored_shapes(model).values()) * BF16
    assert weight_bytes(model, BF16) == pytest.approx(stored, rel=0.001)


def test_plans_know_the_limits_of_an_engine_without_its_device() -> None:
    model = model_of(LLAMA_3_8B)
    on_gpu = engine_limits(EngineConfig(), model, "cuda", 80 << 30)
    assert (on_gpu.batch_rows, on_gpu.step_tokens) == (320, 16384)
    assert 40 << 30 < on_gpu.pool_bytes < 50 << 30
    on_cpu = engine_limits(EngineConfig(), model, "cpu", 64 << 30)
    assert on_cpu == EngineLimits(64, 512, 2 << 30, 4 * on_gpu.token_bytes // 2, 16, 4)
    assert engine_limits(EngineConfig(pool_bytes=5), model, "cpu", 8 << 30).pool_bytes == 5
    assert engine_limits(EngineConfig(), model, "cpu", 8 << 30).pool_bytes == 1 << 30


@pytest.mark.parametrize("shape", [LLAMA_3_8B, LLAMA_3_2_1B], ids=lambda shape: shape.name)
def test_plans_know_the_memory_of_an_engine_on_a_cpu(shape: ModelShape) -> None:
    # Beside what is measured: benchmarks/engine/memory.py.
    model = model_of(shape)
    linears, embeddings = live_weight_bytes(model, 1), model.vocab_size * model.hidden_size
    file_bytes = sum(math.prod(sizes) for sizes in stored_shapes(model).values()) * BF16

    def planned(**options: Any) -> CpuMemory:
        config = EngineConfig(**options)
        return cpu_memory(config, model, engine_limits(config, model, "cpu", 64 << 30), file_bytes)

    plain = planned()
    assert plain.weights == pytest.approx(2 * linears + 4 * embeddings, rel=0.001), "a tied head is packed, too"
    assert plain.pool == 2 << 30
    assert plain.merged == 8 * linears, "two copies in fp32"
    assert plain.unmerged == plain.weights + plain.pool + plain.working
    assert plain.working > 240e6 + 64 * model.vocab_size * 16, "logits of 64 rows"
    assert planned(base_quantization="int8").weights == pytest.approx(linears + 4 * embeddings, rel=0.001)
    assert planned(tensor_parallel=2).working == 2 * plain.working
    assert planned(max_step_tokens=4096).working > plain.working
