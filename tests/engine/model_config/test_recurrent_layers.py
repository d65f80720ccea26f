"""Rows of a model with recurrent layers, whose states lie in the pool beside keys and values: they answer with the same
bits whatever happens around them, and take the memory that is planned for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from peft_oracle import make_engine as make_small_engine
from peft_oracle import prompts, scores_of_continuations, serve
from safetensors.numpy import load_file, save_file
from scenarios import ANYTHING, NUM_ADAPTERS, Alone, Scenario, make_engine, play, renamed, scenarios

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.errors import EngineError
from lorabatch.engine.memory.limits import cpu_limits
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.models.gpu_decoder import check_on_gpu
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.audit import AdapterAudit
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.system.codec import from_plain, to_plain

HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.fixture(scope="module")
def hybrid(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last layer is recurrent, too."""
    return make_model(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_5_text", **HYBRID)


@pytest.fixture(scope="module")
def model(hybrid: Path) -> ModelConfig:
    return read_model_config(hybrid)


@pytest.fixture(scope="module")
def folders(
    hybrid: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Adapters by content hash."""
    root, model = tmp_path_factory.mktemp("adapters"), read_model_config(hybrid)
    made = [make_adapter(root / f"{i}", hybrid, seed=i, r=1 + 5 * i) for i in range(NUM_ADAPTERS)]
    found = {audit_adapter(folder, model, folder.name).identity_sha256: folder for folder in made}
    return {identity: folder for identity, folder in found.items() if identity is not None}


@pytest.mark.long
@settings(ANYTHING)
@given(scenario=scenarios(draws_freely=True))
def test_whatever_happens_around_a_row_it_has_the_same_bits(
    hybrid: Path, folders: dict[str, Path], scenario: Scenario
) -> None:
    alone = Alone(make_engine(hybrid, folders, "exact", pool_bytes=8 << 20))
    config = scenario.config | {"pool_bytes": 2 * scenario.config["pool_bytes"]}
    engines = [make_engine(hybrid, folders, "exact", **config) for _ in range(2)]
    results = play(engines, scenario, list(folders))
    for _, request in scenario.arrivals:
        if request.request_id in results:
            assert results[request.request_id] == alone.of(renamed(request, list(folders)))


def test_texts_of_a_choice_are_scored_from_the_start(hybrid: Path) -> None:
    """A row that goes to another text has a state that is none of that text's."""
    texts = ("yes", "yesterday", "nobody knows", "the quick brown")
    sampling = SamplingParams(max_tokens=20, choice=texts)
    asked = [Request(f"row-{i}", prompt, None, sampling, i) for i, prompt in enumerate(prompts(4, 300))]
    scored = serve(make_small_engine(hybrid, "exact"), asked)
    expected = scores_of_continuations(hybrid, asked, texts)
    assert {name: result.choice_logprobs for name, result in scored.items()} == expected


def test_prompts_that_begin_alike_are_each_computed_whole(hybrid: Path) -> None:
    engine = make_small_engine(hybrid, uses_prefix_cache=True)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    rows = [Request(f"{i}", (*range(3, 90), 100 + i), None, sampling) for i in range(6)]
    assert {result.reused_prompt_tokens for result in serve(engine, rows).values()} == {0}


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_state_takes_whole_pages_of_the_pool(model: ModelConfig, itemsize: int) -> None:
    layout = page_layout(model, 16, itemsize)
    state_bytes = 4 * 2 * (3 * 128 + 4 * 16 * 16)
    assert 4 * model.state_elements == state_bytes
    page_bytes = layout.page_elements * itemsize
    assert (layout.row_pages - 1) * page_bytes < state_bytes <= layout.row_pages * page_bytes
    assert page_bytes == 16 * 2 * 2 * 16 * itemsize, "one layer of three has keys and values"
    limits = cpu_limits(0, EngineConfig(pool_bytes=1 << 20), model, itemsize)
    assert (limits.row_pages, limits.page_tokens * limits.token_bytes) == (layout.row_pages, page_bytes)


def test_a_row_enters_with_the_pages_of_its_state(hybrid: Path, model: ModelConfig) -> None:
    """A pool of one row's pages serves rows one by one, and one with a page less refuses them."""
    layout = page_layout(model, 16, 4)
    row = Request("0", tuple(range(3, 20)), None, SamplingParams(max_tokens=3, ignore_eos=True))
    needed = (layout.pages_for_tokens(19) + layout.row_pages) * layout.page_elements * 4

    def engine(pool_bytes: int) -> Engine:
        return Engine(hybrid, EngineConfig(mode="unmerged", pool_bytes=pool_bytes, dtype="float32"))

    answers = serve(engine(needed), [replace(row, request_id=str(i)) for i in range(3)])
    assert len({result.token_ids for result in answers.values()}) == 1
    (refused,) = engine(needed - 1).run([row])
    assert refused.error is not None
    assert f"need {needed // layout.page_elements // 4} pages" in refused.error


def test_gpus_refuse_the_model_by_name(model: ModelConfig) -> None:
    with pytest.raises(EngineError, match="has layers of the gated delta rule and gates of attention's output, which"):
        check_on_gpu(model)


@pytest.mark.parametrize("saved", [["conv1d"], ["norm"], ["in_proj_a", "out_proj"], ["linear_attn"]], ids=str)
def test_layers_that_adapters_save_whole_equal_peft(
    saved: list[str], hybrid: Path, tmp_path: Path, make_adapter: Callable[..., Path], compare: Any
) -> None:
    """The convolution's weights, the norm of a value head, projections, or all of it; by merge."""
    target = "q_proj" if "linear_attn" in saved else "in_proj_qkv"
    adapter = make_adapter(tmp_path / "adapter", hybrid, r=4, target_modules=[target], modules_to_save=saved)
    engine = compare.engine(hybrid, "merged")
    prompt = compare.prompt(40, engine)
    expected = compare.generate(compare.model(hybrid, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
def test_lora_on_a_convolution_is_refused_by_what_it_is(
    hybrid: Path, model: ModelConfig, tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    adapter = make_adapter(tmp_path / "adapter", hybrid, r=128, target_modules=["conv1d", "q_proj"])
    audit = audit_adapter(adapter, model, "convolved")
    assert audit.verdict == "refused"
    expected = "'model.layers.0.linear_attn.conv1d' is no linear layer of the base, and LoRA on it is not computed"
    assert expected in "; ".join(audit.reasons)


@pytest.mark.parametrize(
    ("names", "whose"),
    [
        ({"in_proj_qkv": "in_proj_q"}, "it is a part of in_proj_qkv, and is read only as one of the three plain pairs"),
        ({"in_proj_qkv": "in_proj_qkvz", "in_proj_b": "in_proj_ba"}, "Qwen3-Next and SGLang pack the projections so"),
        ({"in_proj_qkv": "in_proj"}, "Megatron packs all projections so"),
        ({"in_proj_z": "in_proj_gate"}, "no known spelling of Qwen 3.5's projections"),
    ],
    ids=str,
)
def test_other_spellings_of_the_projections_are_refused_by_whose_they_are(
    names: dict[str, str], whose: str, model: ModelConfig, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = next(iter(folders.values()))
    shutil.copytree(source, tmp_path / "adapter")
    tensors = load_file(source / "adapter_model.safetensors")
    for own, other in names.items():
        tensors = {key.replace(f"{own}.", f"{other}."): value for key, value in tensors.items()}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    reasons = "; ".join(audit_adapter(tmp_path / "adapter", model, "spelled").reasons)
    missing = (f"the base has no linear layer 'model.layers.0.linear_attn.{name}'" for name in names.values())
    assert any(reason in reasons for reason in missing)
    assert whose in reasons
    assert "This base has in_proj_qkv, in_proj_z, in_proj_b and in_proj_a." in reasons


ROWS = {"q": slice(0, 32), "k": slice(32, 64), "v": slice(64, 128)}  # of in_proj_qkv in `HYBRID`
RANK = 3


def split(folder: Path, target: Path, dtype: str = "float32", **changes: Any) -> tuple[Path, Path]:
    """Two folders: an adapter as Tinker saves it, whose in_proj_qkv has three random pairs, and the same with one pair
    in PEFT's form. `changes`: of Tinker's configuration.
    """
    rng = np.random.default_rng(0)
    ours, tinkers = {}, {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        if "in_proj_qkv.lora_A" not in key and "in_proj_qkv.lora_B" not in key:
            ours[key] = tinkers[key] = value.astype(dtype)
        if "in_proj_qkv.lora_A" not in key:
            continue
        of_b = key.replace("lora_A", "lora_B")
        ours[key] = np.zeros((3 * RANK, value.shape[1]), dtype)
        ours[of_b] = np.zeros((128, 3 * RANK), dtype)
        for i, (part, rows) in enumerate(ROWS.items()):
            a = (0.1 * rng.standard_normal((RANK, value.shape[1]))).astype(dtype)
            b = (0.1 * rng.standard_normal((rows.stop - rows.start, RANK))).astype(dtype)
            columns = slice(RANK * i, RANK * (i + 1))
            ours[key][columns], ours[of_b][rows, columns] = a, b
            tinkers[key.replace("in_proj_qkv", f"in_proj_{part}")] = a
            tinkers[of_b.replace("in_proj_qkv", f"in_proj_{part}")] = b
    raw = json.loads((folder / "adapter_config.json").read_text())
    of_pairs = {"rank_pattern": {"in_proj_qkv": 3 * RANK}, "alpha_pattern": {"in_proj_qkv": 3 * raw["lora_alpha"]}}
    kept = {key: raw[key] for key in ("peft_type", "r", "lora_alpha")} | {"target_modules": "all-linear"} | changes
    for name, tensors, config in (("tinkers", tinkers, kept), ("ours", ours, raw | of_pairs)):
        (target / name).mkdir()
        (target / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, target / name / "adapter_model.safetensors")
    return target / "tinkers", target / "ours"


@pytest.mark.parametrize("targets", ["all-linear", ["in_proj_qkv", "out_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_three_pairs_of_tinker_for_one_layer_are_read_as_one(
    dtype: str,
    targets: Any,
    hybrid: Path,
    model: ModelConfig,
    tmp_path: Path,
    make_adapter: Callable[..., Path],
    compare: Any,
) -> None:
    trained = make_adapter(tmp_path / "adapter", hybrid, r=RANK, target_modules=targets)
    tinkers, ours = split(trained, tmp_path, dtype)
    audit = audit_adapter(tinkers, model, "tinkers")
    assert audit.verdict == "exact", audit.reasons
    assert audit.content_sha256 == audit_adapter(ours, model, "ours").content_sha256
    assert any("read as one of three times the rank" in note for note in audit.notes)
    assert from_plain(AdapterAudit, to_plain(audit)) == audit, "audits come from another process"
    compare.equal_with_and_without(hybrid, tinkers, compare.model(hybrid), compare.model(hybrid, ours))


@pytest.mark.parametrize(
    "damage", ["one of the three is gone", "one B is gone", "two types", "another rank", "keys as wide as values"]
)
def test_three_pairs_that_do_not_fit_together_are_refused(
    damage: str, model: ModelConfig, folders: dict[str, Path], tmp_path: Path
) -> None:
    tinkers, _ = split(list(folders.values())[-1], tmp_path, r=RANK)
    file = tinkers / "adapter_model.safetensors"
    tensors = load_file(file)
    of_k = [key for key in tensors if "layers.2.linear_attn.in_proj_k" in key]
    assert len(of_k) == 2
    if damage == "one of the three is gone":
        tensors = {key: value for key, value in tensors.items() if key not in of_k}
    if damage == "one B is gone":
        tensors.pop(next(key for key in of_k if "lora_B" in key))
    for key in of_k:
        if damage == "two types":
            tensors[key] = tensors[key].astype("float16")
        if damage == "another rank":
            tensors[key] = tensors[key][:1] if "lora_A" in key else np.ascontiguousarray(tensors[key][:, :1])
        if damage == "keys as wide as values" and "lora_B" in key:
            tensors[key] = np.concatenate([tensors[key]] * 2)
    save_file(tensors, file)
    reasons = "; ".join(audit_adapter(tinkers, model, "tinkers").reasons)
    assert "model.layers.2.linear_attn.in_proj_q" in reasons
    assert "read only as one of the three plain pairs" in reasons


@pytest.mark.parametrize("changes", [{"alpha_pattern": {"in_proj_k": 64}}, {"rank_pattern": {"in_proj_k": 3}}], ids=str)
def test_three_pairs_whose_factors_may_differ_are_refused(
    changes: dict[str, Any], model: ModelConfig, folders: dict[str, Path], tmp_path: Path
) -> None:
    tinkers, _ = split(list(folders.values())[-1], tmp_path, r=RANK, **changes)
    audit = audit_adapter(tinkers, model, "tinkers")
    assert audit.verdict == "refused"
    assert "read only as one of the three plain pairs" in "; ".join(audit.reasons)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"base_quantization": "int8"}], ids=str)
def test_a_pool_of_16_bits_holds_states_of_32(settings: dict[str, Any], hybrid: Path) -> None:
    """Texts are scored, so that one token's rounding decides nothing."""
    asked = [
        Request(f"{i}", prompt, None, SamplingParams(max_tokens=1, prompt_logprobs=True))
        for i, prompt in enumerate(prompts(6, 300))
    ]
    engine = Engine(hybrid, EngineConfig(mode="unmerged", pool_bytes=4 << 20, **settings))
    assert engine.backend.pool_dtype == torch.bfloat16
    found, expected = serve(engine, asked), serve(make_small_engine(hybrid), asked)
    for row in asked:
        ours, exact = (torch.tensor(of[row.request_id].prompt_logprobs) for of in (found, expected))
        assert (ours - exact).abs().mean() < 0.2
