"""The whole engine on GPU kernels gives the CPU engine's tokens: prompts in chunks, decoding, adapters, families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import weights_sha256
from tiny_bases import with_attention

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.model_config.layer import RopeConfig
from lorabatch.engine.models import gpu_decoder
from lorabatch.engine.models.gpu_decoder import check_on_gpu
from lorabatch.engine.models.gpu_step import GpuStep, StepBuffer
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.runner.backend import GpuBackend, MakeBackend, choose_backend
from lorabatch.engine.runner.gpu_graphs import StepExecutor
from lorabatch.engine.runner.gpu_runner import GpuRunner
from lorabatch.kernels.launch import is_interpreted

CONFIG = EngineConfig(
    max_batch_rows=8, max_step_tokens=24, page_tokens=4, pool_bytes=8 << 20, device="cpu", mode="unmerged"
)
# Triton's interpreter on CPU tensors, or with TRITON_INTERPRET=0 a GPU
ON_DEVICE: dict[str, Any] = {"kernels": "triton"} if is_interpreted() else {"device": "cuda", "dtype": "float32"}
GARBAGE = 0x7F7F7F7F
GROWING = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.5,
    },
}


def requests(adapter_ids: list[str | None], **sampling: Any) -> list[Request]:
    """Rows of different lengths, one longer than a step."""
    lengths = [5, 26, 1, 9, 4]
    settings = SamplingParams(**({"max_tokens": 2, "ignore_eos": True, "logprobs": True} | sampling))
    return [
        Request(str(i), tuple((7 * i + 3 * j) % 250 for j in range(lengths[i % 5])), adapter_id, settings, i)
        for i, adapter_id in enumerate(adapter_ids)
    ]


def run(
    folder: Path,
    adapters: dict[str, Path],
    rows: list[Request],
    config: EngineConfig,
    make_backend: MakeBackend = choose_backend,
) -> list[Result]:
    engine = Engine(folder, config, make_backend=make_backend)
    for adapter_id, path in adapters.items():
        engine.register_adapter(adapter_id, path)
    results = sorted(engine.run(rows), key=lambda result: int(result.request_id))
    engine.check_integrity()
    return results


def watched(seen: list[GpuStep], first: tuple[int, int, int] | None) -> MakeBackend:
    """A backend whose runner begins with `first` and poisoned scratch, and adds the steps it computes to `seen`."""

    class Runner(GpuRunner):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, first)
            for scratch in (self._memory.scratch, *self._memory.partials):
                scratch.fill_(torch.nan)

        def forward(self, step: GpuStep) -> torch.Tensor:
            seen.append(step)
            return super().forward(step)

    class Backend(GpuBackend):
        def runner(self, live: Any, memory: Any, layout: Any, config: Any, stop_tokens: Any) -> GpuRunner:
            return Runner(self.decoder, live, memory, layout, config, stop_tokens, self.executor())

    return Backend


def assert_equal(found: list[Result], expected: list[Result]) -> None:
    assert [r.error for r in found] == [None] * len(found)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [(r.text, r.finish_reason, r.mode) for r in found] == [(r.text, r.finish_reason, r.mode) for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[GpuStep]:
    """The steps that devices compute. What their lists leave free, on host and device, holds garbage."""
    create = StepBuffer.__init__

    def poisoned(buffer: StepBuffer, sizes: Any, memory: torch.Tensor) -> None:
        create(buffer, sizes, memory.fill_(GARBAGE))

    monkeypatch.setattr(StepBuffer, "__init__", poisoned)
    return []


@pytest.fixture
def compare(steps: list[GpuStep]) -> Callable[..., list[Result]]:
    """`compare(model_folder, adapter_folders, rows_of_ids, first_sizes, **config)`: the same rows on both engines."""

    def check(
        folder: Path,
        adapters: list[Path],
        make_rows: Callable[..., list[Request]] = requests,
        first: tuple[int, int, int] | None = None,
        **config: Any,
    ) -> list[Result]:
        model = read_model_config(folder)
        ids = {audit_adapter(path, model, path.name).content_sha256 or "": path for path in adapters}
        rows = make_rows([None, *ids])
        expected = run(folder, ids, rows, replace(CONFIG, **config))
        found = run(folder, ids, rows, replace(CONFIG, **ON_DEVICE, **config), watched(steps, first))
        assert_equal(found, expected)
        return found

    return check


@pytest.mark.long
def test_many_adapters_and_the_base_in_one_batch(
    tiny_llama: Path, tiny_adapters: dict[str, Path], compare: Callable[..., object], steps: list[GpuStep]
) -> None:
    """Ranks 1, 8, 20 and 64, greedy and drawn, with and without `min_tokens`."""

    def rows(ids: list[str | None]) -> list[Request]:
        drawn = {"temperature": 0.9, "seed": 5}
        settings = [{}, {**drawn, "top_k": 7}, {"min_tokens": 3, "ignore_eos": False}, {**drawn, "top_p": 0.8}, drawn]
        made = requests(ids, max_tokens=3)
        return [replace(r, sampling=replace(r.sampling, **s)) for r, s in zip(made, settings, strict=True)]

    compare(tiny_llama, list(tiny_adapters.values()), rows)
    residents = {plus for step in steps for _, _, plus, _, _ in step.segments.tiles_list()}
    assert -1 in residents
    assert len(residents) == 5
    prompts = [step for step in steps if len(step.token_ids) > len(step.sampled_rows)]
    assert any(int(step.positions[0]) > 0 for step in prompts), "no prompt came in chunks"
    assert any(step.first_place > 0 for step in steps), "no decode rows beside prompts"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        pytest.param("qwen3", {"head_dim": 20}, marks=pytest.mark.long),
        pytest.param("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, marks=pytest.mark.long),
        pytest.param("phi3", {}, marks=pytest.mark.long),
        pytest.param("granite", {"residual_multiplier": 0.3, "logits_scaling": 2.0}, marks=pytest.mark.long),
        pytest.param("granite_swa", {"sliding_window": 8, "layer_rope_theta": [0, 1e5]}, marks=pytest.mark.long),
        pytest.param("smollm3", {"no_rope_layers": [1, 0]}, marks=pytest.mark.long),
        pytest.param("starcoder2", {"sliding_window": 8}, marks=pytest.mark.long),
        pytest.param("exaone4", {"head_dim": 16, "sliding_window": 8}, marks=pytest.mark.long),
        pytest.param("ministral3", GROWING, marks=pytest.mark.long),
        pytest.param("gpt2", {"n_inner": 96}, marks=pytest.mark.long),
    ],
)
def test_families_with_other_norms_ropes_windows_and_activations(
    family: str,
    settings: dict[str, Any],
    tmp_path: Path,
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
    compare: Callable[..., object],
) -> None:
    folder = make_model(tmp_path / "base", family, **settings)
    transposed = {"fan_in_fan_out": True} if family == "gpt2" else {}
    compare(folder, [make_adapter(tmp_path / "adapter", folder, r=20, **transposed)])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_parallel": True}, "attention and MLP side by side"),
        ({"head_norm": "whole"}, "over all heads"),
        ({"head_norm": "rotated_head"}, "behind their rotation"),
        ({"rope": RopeConfig(16, is_interleaved=True)}, "neighbouring features rotated together"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(
    changes: dict[str, Any], what: str, tiny_llama: Path
) -> None:
    model = read_model_config(tiny_llama)
    check_on_gpu(model)
    with pytest.raises(EngineError, match=rf"model_type='llama': has .*{what}.*--device cpu"):
        check_on_gpu(with_attention(model, **changes) if "rope" in changes else replace(model, **changes))


def test_a_family_that_the_kernels_lack_is_refused_before_a_weight_is_read(
    tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    folder = make_model(tmp_path, "olmo2")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match=r"model_type='olmo2'.*over all heads"):
        Engine(folder, replace(CONFIG, **ON_DEVICE))


@pytest.mark.long
def test_a_rank_beyond_what_buckets_and_scratch_were_made_for(
    tiny_llama: Path,
    tmp_path: Path,
    make_adapter: Callable[..., Path],
    compare: Callable[..., object],
    steps: list[GpuStep],
) -> None:
    wide = make_adapter(tmp_path / "wide", tiny_llama, r=272, target_modules=["q_proj"])
    compare(tiny_llama, [wide], lambda ids: requests(ids)[::-1], (64, 4, 16))
    assert max(step.segments.limits.scratch_rows for step in steps) > 16


@pytest.mark.long
def test_the_last_layer_goes_on_with_the_rows_whose_logits_are_asked(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    steps: list[GpuStep],
    compare: Callable[..., list[Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of 60, 9 and 5 tokens in steps of 24, of the base and of two adapters; some step asks for no logits."""
    joined: list[tuple[int, int]] = []
    lora_residual_ = gpu_decoder.lora_residual_

    def noted(y: torch.Tensor, residual: Any, bias: Any, table: Any, segments: Any, scratch: Any, *place: int) -> Any:
        joined.append((place[0], len(y)))
        return lora_residual_(y, residual, bias, table, segments, scratch, *place)

    def rows(ids: list[str | None]) -> list[Request]:
        asked = {"max_tokens": 2, "ignore_eos": True, "logprobs": True}
        lengths = [60, 9, 5]
        return [
            Request(str(i), tuple((7 * i + 3 * j) % 250 for j in range(n)), ids[i], SamplingParams(**asked), i)
            for i, n in enumerate(lengths)
        ]

    monkeypatch.setattr(gpu_decoder, "lora_residual_", noted)
    compare(tiny_llama, [tiny_adapters["rank8"], tiny_adapters["rank20"]], rows)
    last = read_model_config(tiny_llama).num_layers - 1
    for step in steps:
        of_layers = [[joined.pop(0) for _ in range(2)] for _ in range(last)]
        assert {count for layer in of_layers for _, count in layer} == {len(step.token_ids)}
        if len(step.sampled_rows):
            assert [joined.pop(0) for _ in range(2)] == [(last, len(step.sampled_rows))] * 2
    assert not joined, "a step that asks for no logits ends with its attention"
    assert {len(step.sampled_rows) < len(step.token_ids) for step in steps} == {True, False}
    assert any(step.has_lora and 0 < len(step.sampled_rows) < len(step.token_ids) for step in steps)
    assert any(not len(step.sampled_rows) for step in steps)


@pytest.mark.long
def test_merging_by_the_kernel_and_parameter_by_parameter(
    tiny_llama: Path,
    tiny_adapters: dict[str, Path],
    tmp_path: Path,
    make_adapter: Callable[..., Path],
    compare: Callable[..., list[Result]],
) -> None:
    """Plain pairs of two adapters, one after the other, then DoRA, which is more than a pair."""
    dora = make_adapter(tmp_path / "dora", tiny_llama, r=4, use_dora=True, target_modules=["v_proj", "down_proj"])
    results = compare(tiny_llama, [tiny_adapters["rank8"], tiny_adapters["rank20"], dora], mode="merged")
    assert [result.mode for result in results] == ["base", "merged", "merged", "merged"]


@pytest.mark.long
def test_any_number_of_switches_leaves_the_weights_bit_for_bit(
    tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    forgotten: list[bool] = []

    class Forgetting(StepExecutor):
        def forget(self) -> None:
            forgotten.append(True)

    class Backend(GpuBackend):
        def executor(self) -> Forgetting:
            return Forgetting()

    engine = Engine(tiny_llama, replace(CONFIG, **(ON_DEVICE | {"mode": "merged"})), make_backend=Backend)
    before = weights_sha256(engine)
    for path in (tiny_adapters["rank8"], tiny_adapters["rank1"], tiny_adapters["rank8"]):
        content = audit_adapter(path, engine.model, path.name).content_sha256 or ""
        engine.register_adapter(content, path)
        list(engine.run(replace(row, adapter_id=content) for row in requests([None])))
        assert weights_sha256(engine) != before
    engine.switch_weights(None)
    assert weights_sha256(engine) == before
    # rank8 gives q and v their live buffers, rank1 all others; the second rank8 finds every address as it was
    assert len(forgotten) == 2
