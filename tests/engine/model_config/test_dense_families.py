"""Families that are described by data alone, against transformers and PEFT. Three are checked always, all in the long
form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bases import DENSE_FAMILIES, YARN
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import EngineError
from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.model_config.families import FAMILIES
from lorabatch.engine.model_config.keys import IRRELEVANT
from lorabatch.engine.model_config.layer import RopeConfig
from lorabatch.engine.models.load import stored_shapes
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.names import parse_name

MakeFolder = Callable[..., Path]
ALWAYS = ("smollm3", "cohere2", "gpt2")
EVERY = [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.long) for case in DENSE_FAMILIES]
NEW = sorted({family for family, _ in DENSE_FAMILIES.values()})


@pytest.mark.parametrize("case", EVERY)
def test_logits_and_adapters_equal_transformers_and_peft(
    case: str, tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    """Chunked prefill and decoding, within every window and beyond; a pair on each layer, unmerged and merged."""
    family, settings = DENSE_FAMILIES[case]
    folder = make_model(tmp_path / "base", family, **settings)
    transposed = {"fan_in_fan_out": True} if family == "gpt2" else {}
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, **transposed)
    compare.equal_with_and_without(folder, adapter, compare.model(folder), compare.model(folder, adapter))


@pytest.mark.long
@pytest.mark.parametrize("case", DENSE_FAMILIES)
def test_rows_of_other_lengths_in_the_same_batch_change_nothing(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = DENSE_FAMILIES[case]
    folder = make_model(tmp_path, family, **settings)
    compare.equal_in_one_batch(compare.engine(folder), compare.model(folder))


# What a model is made to forget, and the cases in which that must show.
FORGOTTEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a parallel MLP": (["cohere"], {"is_parallel": False}),
    "factors of outputs": (["granite"], {"residual_scale": 1.0}),
    "factors of logits": (["granite", "cohere2"], {"logit_scale": 1.0}),
    "factors of scores": (["granite"], {"attention_scale": 0.25}),
    "factors of embeddings": (["granite"], {"embedding_scale": 1.0}),
    "growing queries": (["ministral3"], {"query_growth": None}),
    "norms behind the rotation": (["hunyuan"], {"head_norm": "head"}),
    "bases of rotary frequencies": (["granite swash"], {"rope": RopeConfig(16)}),
    "windows": (["granite swash", "ministral", "olmo3", "cohere2", "starcoder2"], {"window": None}),
    "norms without a mean": (["cohere"], {"norm_kind": "rms"}),
    "the square": (["arcee"], {"activation": "relu"}),
}


@pytest.mark.long
@pytest.mark.parametrize("setting", FORGOTTEN)
def test_what_sets_a_family_apart_shows_in_its_logits(
    setting: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    cases, changes = FORGOTTEN[setting]
    for case in cases:
        family, settings = DENSE_FAMILIES[case]
        folder = make_model(tmp_path / case, family, **settings)
        engine = compare.engine(folder)
        names = engine.model.names
        if setting == "a parallel MLP":
            changes = changes | {"names": replace(names, norms=replace(names.norms, before_mlp="input_layernorm"))}
        prompt = compare.prompt(70, engine)
        _, logits = compare.record(engine, prompt)
        _, without = compare.record(compare.engine(folder, changes=changes), prompt)
        assert (without - logits).abs().max() > 2e-3, case


@pytest.mark.long
@pytest.mark.parametrize("case", ["smollm3", "cohere2", "exaone4", "glm4", "helium"])
def test_which_layers_and_features_are_rotated_shows_in_the_logits(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = DENSE_FAMILIES[case]
    folder = make_model(tmp_path, family, **settings)
    engine = compare.engine(folder)
    ropes = engine.model.layer_ropes
    first = next(rope for rope in ropes if rope is not None)
    others = [first] if None in ropes else []
    others += [replace(first, is_interleaved=False)] if first.is_interleaved else []
    prompt = compare.prompt(70, engine)
    _, logits = compare.record(engine, prompt)
    assert others
    for other in others:
        _, without = compare.record(compare.engine(folder, changes={"rope": other}), prompt)
        assert (without - logits).abs().max() > 2e-3


# A file that says nothing asks for experts and for Mamba layers.
DENSE = {"num_local_experts": 0, "layer_types": ["full_attention"] * 4, "mamba_n_heads": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": DENSE,
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
}


def sizes_of(family: str) -> dict[str, Any]:
    """As many heads as the family's default number of key heads asks for."""
    num_heads = max(4, FAMILIES[family].defaults.get("num_key_value_heads", 0))
    sizes = {
        "vocab_size": 96,
        "hidden_size": 16 * num_heads,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 64,
    }
    named = {FAMILIES[family].aliases.get(key, key): value for key, value in sizes.items()}
    return named | OWN_SIZES.get(family, {})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_of_transformers_model_has_a_place(family: str) -> None:
    """And in the same shape, and an adapter may save it; parameters that are not loaded do not matter."""
    head_dim = {} if family in ("cohere2", "gpt2", "starcoder2") else {"head_dim": 16}
    config = AutoConfig.for_model(family, **(sizes_of(family) | head_dim | {"pad_token_id": None}))
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    raw = config.to_dict() | {"architectures": None}
    model = parse_model_config(raw, {})
    transposed = {f"{name}.weight" for name in model.batched_modules() if model.names.is_transposed}
    found = {
        name: tuple(tensor.shape[::-1] if name in transposed else tensor.shape)
        for stored, tensor in state.items()
        if (name := model.names.of_stored(stored)) is not None
    }
    if model.is_tied:
        found.pop("lm_head.weight", None)
    assert found == stored_shapes(model)
    saved = {name: parse_name(f"base_model.model.{name}") for name in found}
    assert all(part is not None and f"{part.module}.{part.parameter}" == name for name, part in saved.items()), saved


@pytest.mark.parametrize("family", NEW)
def test_silence_means_what_transformers_assumes(family: str) -> None:
    whole = CONFIG_MAPPING[family](**sizes_of(family)).to_dict()
    left_out = {"architectures", "pad_token_id", "id2label"}
    spoken = parse_model_config({key: value for key, value in whole.items() if key not in left_out}, {})
    assert parse_model_config({"model_type": family, **sizes_of(family)}, {}) == spoken


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 4
    return [0, 0, 0, 0] if value is None or isinstance(value, list) else f"other {value}"


@pytest.mark.parametrize("family", NEW)
def test_every_key_of_its_own_is_used_and_no_irrelevant_one_is(family: str) -> None:
    raw = {"model_type": family, **sizes_of(family)}
    whole = CONFIG_MAPPING[family](**sizes_of(family)).to_dict()
    plain = parse_model_config(raw, {})
    for key, value in whole.items():
        try:
            asked = "rope" if key == "position_embedding_type" else changed(value)
            other = parse_model_config(raw | {key: asked}, {})
        except EngineError:
            assert key not in IRRELEVANT
            continue
        if key in FAMILIES[family].own_keys:
            assert other != plain, f"{key} is read and changes nothing"
        elif key in IRRELEVANT:
            assert other == plain, f"{key} changes the model"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a rotation of unknown layers": ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers: .* each 0 or 1"),
    "too few bases": ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta: .* a list of 4"),
    "a negative base": ("granite_swa", {"layer_rope_theta": [1e4, -1, 0, 0]}, "layer_rope_theta: .* 0 or more"),
    "a base that is a word": ("granite_swa", {"layer_rope_theta": [1e4, "1e4", 0, 0]}, "layer_rope_theta: .* 0 or"),
    "too few layers": ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers: .* a list of 4"),
    "windows switched off": (
        "smollm3",
        {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
        "use_sliding_window: .*expected true",
    ),
    "an infinite factor": ("granite", {"residual_multiplier": float("inf")}, "residual_multiplier: found inf"),
    "no factor": ("granite", {"logits_scaling": 0}, "logits_scaling: found 0"),
    "a factor of words": ("cohere", {"logit_scale": "big"}, "logit_scale: found 'big'"),
    "windows without a size": ("cohere2", {"sliding_window": None}, "sliding_window: missing"),
    "letters for layers": ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: found 'LLLG'"),
    "scores without a scale": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    "heads of unequal size": ("gpt2", {"n_head": 5}, "num_attention_heads: .*divisor of hidden_size=64"),
    "growth without a number": ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta: missing"),
    "growth without end": (
        "ministral3",
        {
            "max_position_embeddings": 1 << 40,
            "rope_parameters": YARN | {"original_max_position_embeddings": 1, "llama_4_scaling_beta": 0.1},
        },
        "original_max_position_embeddings: found 1, expected at least",
    ),
    "layers of another kind": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
        "layer_types=.*expected attention in each of 4 layers",
    ),
    "no kinds of layers": ("granitemoehybrid", {"layer_types": None}, "layer_types=None is not supported"),
    "one expert beside the MLP": ("granitemoehybrid", {"num_local_experts": 1}, "num_local_experts=1 is not supported"),
    "a part of odd size": ("glm4", {"partial_rotary_factor": 0.06}, "partial_rotary_factor: .*rotates 7 of 128"),
    "a stretch of words": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": "much"}},
        "alpha: found 'much'",
    ),
    "several experts": ("hunyuan_v1_dense", {"num_experts": 8}, "num_experts=8 is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_damaged_or_not_computed_is_refused_by_name(case: str) -> None:
    family, settings, message = REFUSED[case]
    with pytest.raises(EngineError, match=f"(?s)config.json.*{message}"):
        parse_model_config({"model_type": family, **sizes_of(family), **settings}, {})


def test_silence_may_mean_experts() -> None:
    sizes = sizes_of("granitemoehybrid")
    del sizes["num_local_experts"]
    with pytest.raises(EngineError, match="num_local_experts=8 is not supported"):
        parse_model_config({"model_type": "granitemoehybrid", **sizes}, {})


def test_one_expert_is_a_dense_model() -> None:
    raw = {"model_type": "hunyuan_v1_dense", **sizes_of("hunyuan_v1_dense")}
    assert parse_model_config(raw | {"num_experts": 1}, {}) == parse_model_config(raw, {})


def test_a_checkpoint_of_gpt2_may_have_the_names_of_its_first_release(
    tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    """Without the prefix, and with buffers of masks."""
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path, "gpt2", n_inner=96, tie_word_embeddings=True)
    engine, model = compare.engine(folder), compare.model(folder)
    prompt = compare.prompt(9, engine)
    expected = compare.generate(model, prompt)
    tensors = {
        key.removeprefix("transformer."): value for key, value in load_file(folder / "model.safetensors").items()
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256).tril() for layer in range(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    compare.equal_everywhere(compare.engine(folder), prompt, expected)


@pytest.mark.parametrize(
    "lora",
    [{"target_modules": None}, {"use_dora": True}, {"bias": "all"}],
    ids=str,
)
def test_adapters_of_transposed_layers_equal_peft(
    lora: dict[str, Any], tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    folder = make_model(tmp_path / "base", "gpt2", n_inner=96, tie_word_embeddings=True)
    settings = {"target_modules": ["c_attn", "c_fc", "mlp.c_proj"], "fan_in_fan_out": True} | lora
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, **settings)
    engine = compare.engine(folder)
    prompt = compare.prompt(20, engine)
    expected = compare.generate(compare.model(folder, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))


@pytest.mark.parametrize(
    "lora",
    [{"target_modules": ["q_proj", "lm_head"]}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_of_a_head_with_a_bias_equal_peft(
    lora: dict[str, Any], tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    folder = make_model(tmp_path / "base", "phi")
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, **({"target_modules": ["dense", "fc1"]} | lora))
    engine = compare.engine(folder)
    prompt = compare.prompt(20, engine)
    expected = compare.generate(compare.model(folder, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))


def test_a_mixer_that_an_adapter_saves_whole_equals_peft(
    tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    """Its sinks are a parameter without a module of their own."""
    folder = make_model(tmp_path / "base", "granite_swa", sliding_window=16)
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, target_modules=["up_proj"], modules_to_save=["self_attn"])
    engine = compare.engine(folder, "merged")
    prompt = compare.prompt(40, engine)
    expected = compare.generate(compare.model(folder, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))


def test_a_whole_layer_that_is_stored_transposed_is_refused_by_name(
    tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder
) -> None:
    """Attention's output is square, so that its shape says nothing."""
    folder = make_model(tmp_path / "base", "gpt2", n_inner=96, tie_word_embeddings=True)
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["attn.c_proj"]}
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, **settings)
    audit = audit_adapter(adapter, read_model_config(folder), "whole")
    assert audit.verdict == "refused"
    assert any("stored transposed (Conv1D)" in reason for reason in audit.reasons)
