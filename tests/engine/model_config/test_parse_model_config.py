"""What `config.json` may say: defaults where it is silent, refusals by name, damages listed all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.model_config import SUPPORTED_MODEL_TYPES, parse_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.model_config.wrappers import WRAPPERS

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def parse(model_type: str = "llama", **settings: Any) -> ModelConfig:
    raw = {key: value for key, value in (SIZES | settings).items() if value != "absent"}
    values = {"text_config": raw} if model_type in WRAPPERS else raw
    return parse_model_config({"model_type": model_type} | values, {})


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind of model": (
        "mixtral",
        {},
        "model_type='mixtral'.*Supported: arcee, .*gemma, .*llama.*vaultgemma, opt, gemma3, .*qwen3_vl",
    ),
    "no kind at all": ("", {}, "model_type=''"),
    "a model with images that is not served": ("llava", {}, "model_type='llava'.*Supported: .*gemma4, mistral3"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'.*unquantized"),
    "experts": ("qwen3", {"num_experts": 8}, "num_experts=8.*mixtures of experts"),
    "a tagger": ("gemma", {"architectures": ["GemmaForTokenClassification"]}, "ForTokenClassification.*text"),
    "an unknown kind of problem": ("llama", {"problem_type": "ranking"}, "problem_type='ranking'.*regression"),
    "activation": ("llama", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'.*supported: silu, .*relu"),
    "activation of Gemma 2": ("gemma2", {"hidden_activation": "xielu"}, "hidden_activation='xielu'"),
    "activation of OPT": ("opt", {"activation_function": "gelu_10"}, "activation_function='gelu_10'"),
    "kind of rope": (
        "llama",
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        "rope_scaling.type='su'.*supported: default, linear, dynamic, yarn, llama3, longrope",
    ),
    "kind of rope, new spelling": (
        "qwen2",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "rope_parameters.rope_type='proportional'",
    ),
    "kind of rope of Phi-3": (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "supported: default, longrope",
    ),
    "kind of rope of Gemma 3": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "full_attention.rope_type='dynamic'",
    ),
    "ropes by layer type": (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"rope_parameters=\['full_attention'\].*one object for all layers",
    ),
    "one rope for both kinds of layer": (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "an object each for sliding_attention and full_attention",
    ),
    "partial rotation": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*supported: 1.0"),
    "both directions": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "caps of Gemma 3": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "kind of layer": (
        "qwen3",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types='chunked_attention'.*full_attention, sliding_attention",
    ),
    "mixed layers of Mistral": (
        "mistral",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "layer_types.*sliding_attention in every layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_exactly_is_refused_by_name(case: str) -> None:
    model_type, settings, message = REFUSED[case]
    with pytest.raises(EngineError, match=f"(?s)config.json.*{message}"):
        parse(model_type, **settings)


DAMAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a missing size": ("llama", {"hidden_size": "absent"}, "hidden_size: missing, expected a positive"),
    "a size of words": ("llama", {"vocab_size": "many"}, "vocab_size: found 'many', expected a positive"),
    "half a layer": ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers: found 2.5, expected an integer"),
    "no end": ("llama", {"rope_theta": float("inf")}, "rope_theta: found inf"),
    "a flag of words": ("llama", {"attention_bias": "yes"}, "attention_bias: found 'yes', expected true or false"),
    "heads that share no keys": (
        "qwen2",
        {"num_key_value_heads": 3},
        "num_key_value_heads: found 3, expected a divisor",
    ),
    "heads of OPT": ("opt", {"num_attention_heads": 5}, "num_attention_heads: found 5, expected a divisor"),
    "a rope without factor": ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
    "a rope of words": ("llama", {"rope_scaling": "linear"}, "rope_scaling: found 'linear', expected an object"),
    "a ramp of no width": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2}},
        "low_freq_factor: found 2, expected another number than high_freq_factor",
    ),
    "too few factors": (
        "phi3",
        {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 7}},
        "rope_scaling.long_factor: found .* expected a list of 8 positive",
    ),
    "too few layer types": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: .* expected a list of 4 names"),
    "windowed layers without window": (
        "gemma2",
        {"sliding_window": None},
        "sliding_window: missing, expected a positive",
    ),
    "windows switched off": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 4},
        "use_sliding_window: missing, expected true",
    ),
    "a stop token of words": ("llama", {"eos_token_id": "</s>"}, "eos_token_id: found '</s>'"),
    "heads of odd size": ("llama", {"head_dim": 15}, "head_dim: found 15, expected an even number"),
    "a part of odd size": ("phi3", {"partial_rotary_factor": 0.2}, "rotates 3 of 16 features, expected an even part"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_missing_or_makes_no_sense_is_named(case: str) -> None:
    model_type, settings, message = DAMAGED[case]
    with pytest.raises(ModelFilesError, match=f"(?s)config.json.*{message}"):
        parse(model_type, **settings)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(EngineError) as caught:
        parse("qwen2", hidden_act="mish", num_experts=4, vocab_size=0, rope_scaling={"type": "other"})
    for word in ("hidden_act='mish'", "num_experts=4", "vocab_size: found 0", "rope_scaling.type='other'"):
        assert word in str(caught.value)


def test_silence_means_what_transformers_assumes_for_the_family() -> None:
    assert [parse(t).is_tied for t in ("llama", "gemma", "gemma2", "gemma3_text", "opt", "phi3")] == [
        False, True, True, True, True, False,
    ]  # fmt: skip
    assert parse("phi3").norm_eps == 1e-5
    assert parse("qwen3").head_dim == 128
    assert parse("gemma").head_dim == 256
    assert parse("llama").head_dim == 16
    assert parse("llama", num_key_value_heads="absent").num_kv_heads == 4
    assert parse("mistral").sliding_windows == (4096,) * 4
    assert parse("mistral", sliding_window=None).sliding_windows == (None,) * 4
    assert parse("llama", sliding_window=16).sliding_windows == (None,) * 4
    assert parse("qwen2", sliding_window=16).sliding_windows == (None,) * 4
    assert parse("gemma2").sliding_windows == (4096, None) * 2
    assert parse("gemma2").attention_softcap == 50.0
    assert parse("gemma3_text", sliding_window_pattern=3).sliding_windows == (4096, 4096, None, 4096)
    local, full = parse("gemma3_text", num_hidden_layers=6).layer_ropes[4:]
    assert local is not None
    assert full is not None
    assert (local.theta, full.theta) == (10_000.0, 1_000_000.0)


def test_older_names_of_longrope_mean_longrope_in_phi3_only() -> None:
    for name in ("su", "yarn", "longrope"):
        model = parse("phi3", rope_scaling=LONGROPE | {"type": name}, max_position_embeddings=16_384)
        (rope,) = set(map(repr, model.layer_ropes))
        assert "kind='longrope'" in rope
        assert model.layer_ropes[0] is not None
        # the stretch is the ratio of both contexts: 16384 / 4096
        assert model.layer_ropes[0].attention_factor == pytest.approx((1 + 2 / 12) ** 0.5)
    of_llama = parse("llama", rope_scaling={"type": "yarn", "factor": 2.0}).layer_ropes[0]
    assert of_llama is not None
    assert of_llama.kind == "yarn"


def test_stop_tokens_come_from_the_generation_configuration_first(tmp_path: Path) -> None:
    raw = {"model_type": "llama", **SIZES, "eos_token_id": [1, 2], "bos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).eos_token_ids == (1, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model = read_model_config(tmp_path)
    assert model.eos_token_ids == (7,)
    assert model.bos_token_id == 0


def test_a_folder_without_configuration_or_with_a_broken_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match="not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFilesError, match="expected a JSON object"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 7),
        ("architectures", True),
        ("rope_scaling", {"rope_type": [1]}),
        ("model_type", {}),
        ("num_hidden_layers", 2**32),
    ],
)
def test_values_of_other_types_are_the_folders_fault(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SIZES | {key: value}))
    with pytest.raises(EngineError, match=key):
        read_model_config(tmp_path)


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_every_linear_layer_has_a_place_among_the_parameters(model_type: str) -> None:
    dense = {"num_local_experts": 0, "layer_types": ["full_attention"] * 4}
    model = parse(model_type, **(dense if model_type == "granitemoehybrid" else {}))
    linear, parameters = model.linear_shapes(), model.parameter_shapes()
    assert {f"{module}.weight" for module in linear} <= parameters.keys()
    assert linear.keys() - set(model.batched_modules()) == {"lm_head"}
