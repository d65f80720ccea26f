"""GGUF files of every architecture that is read, written as llama.cpp's converter writes them, against the models of
transformers that they were written from. A few are checked always, all in the long form.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_writer import ARCHITECTURES as NUMBERS
from gguf_writer import moved, value_order, write_as_converted
from other_forms import write_gguf
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorabatch.engine.config import read_model_config
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.model_config.families import FAMILIES
from lorabatch.engine.model_config.gguf import ARCHITECTURES, DELTA, SITES, norm_names
from lorabatch.engine.models.gguf.convert import convert_gguf
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter

SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
    "factor": 4.0,
}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 16}
OF_DELTA = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TILED = OF_DELTA | {"linear_num_value_heads": 6, "tie_word_embeddings": True}
GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 272, "final_logit_softcapping": 5.0,
}  # fmt: skip
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96, "vocab_size": 272}
SCALES = {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 0.5}
OF_SCALES = {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.5}
PATTERN = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, True, False]}
# case -> architecture, family, settings of the model, keys beyond those that every model has
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {"rope.dimension_count": 16}),
    "llama stretched": ("llama", "llama", {"rope_parameters": YARN}, {}),
    "qwen3 with biases": ("qwen3", "qwen3", {"head_dim": 32, "attention_bias": True, "rope_parameters": YARN}, {}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {**WINDOWS, "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False, True, False]},
    ),
    "qwen2vl": ("qwen2vl", "qwen2", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": (
        "qwen3vl", "qwen3", {"head_dim": 32}, {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 3}
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 16}, {
        "attention.sliding_window": 16, "rope.dimension_count": 16, "rope.scaling.original_context_length": 128,
    }),
    "phi3 of long rows": (
        "phi3",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "sliding_window": None,
         "tie_word_embeddings": True},
        {"attention.sliding_window": 0, "rope.dimension_count": 12, "rope.scaling.original_context_length": 32,
         "rope.scaling.attn_factor": 1.1832159566199232},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {"rope.dimension_count": 16}),
    "granite": ("granite", "granite", SCALES, {**OF_SCALES, "rope.dimension_count": 16}),
    "granite with biases": (
        "granite", "granite", {**SCALES, "attention_bias": True, "mlp_bias": True}, {**OF_SCALES, "vocab_size": 272}
    ),
    "granite 4": (
        "granite",
        "granitemoehybrid",
        {**SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * 2,
         "shared_intermediate_size": 96, "position_embedding_type": "rope", "mamba_n_heads": 8,
         "tie_word_embeddings": True},
        {**OF_SCALES, "expert_shared_feed_forward_length": 96, "expert_count": 0, "ssm.conv_kernel": 4,
         "ssm.state_size": 8, "ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 8,
         "rope.scaling.finetuned": True},
    ),
    "mistral3": ("mistral3", "mistral", {"head_dim": 24, "sliding_window": None}, {"rope.dimension_count": 24}),
    "mistral3 growing": (
        "mistral3", "ministral3", {"head_dim": 24, "rope_parameters": GROWING},
        {"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}, {}),
    "seed_oss without biases": ("seed_oss", "seed_oss", {"head_dim": 24, "attention_bias": False}, {}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"head_dim": 24, "use_bias": False, "tie_word_embeddings": True}, {}),
    "arcee": ("arcee", "arcee", {}, {"rope.dimension_count": 16}),
    "command-r": (
        "command-r", "cohere", {"logit_scale": 2.0, "tie_word_embeddings": True},
        {"logit_scale": 2.0, "rope.scaling.type": "none"},
    ),
    "command-r with norms of heads": (
        "command-r", "cohere", {"logit_scale": 2.0, "use_qk_norm": True, "tie_word_embeddings": True},
        {"logit_scale": 2.0, "rope.scaling.type": "none"},
    ),
    "cohere2": (
        "cohere2", "cohere2", {**WINDOWS, "logit_scale": 2.0, "tie_word_embeddings": True},
        {"logit_scale": 2.0, "rope.scaling.type": "none", "rope.dimension_count": 16, "vocab_size": 272,
         "attention.sliding_window": 16},
    ),
    "exaone4": ("exaone4", "exaone4", WINDOWS, {**PATTERN, "vocab_size": 272}),
    "exaone4 of full layers": (
        "exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {"vocab_size": 272}
    ),
    "chatglm": ("chatglm", "glm", {"head_dim": 16}, {"rope.dimension_count": 8}),
    "glm4": ("glm4", "glm4", {"head_dim": 16}, {"rope.dimension_count": 8}),
    "gpt2": ("gpt2", "gpt2", {**OF_GPT2, "tie_word_embeddings": True}, {}),
    "hunyuan-dense": (
        "hunyuan-dense",
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4 * 50 ** (16 / 14)}},
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262_144},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {**WINDOWS, "rope_scaling": {**YARN, "rope_theta": 5e5, "attention_factor": 1.3}},
        PATTERN,
    ),
    "qwen35": ("qwen35", "qwen3_5_text", OF_DELTA, {"full_attention_interval": 4}),
    "qwen35 of more values than keys": ("qwen35", "qwen3_5_text", TILED, {"full_attention_interval": 4}),
    "qwen35 of whole groups": (
        "qwen35",
        "qwen3_5_text",
        TILED | {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4},
        {},
    ),
    "qwen35 of listed layers": (
        "qwen35",
        "qwen3_5_text",
        TILED | {"layer_types": ["full_attention", "linear_attention"] * 2, "linear_value_head_dim": 24},
        {"attention.recurrent_layers": [False, True] * 2},
    ),
    "gemma4": ("gemma4", "gemma4_text", GEMMA4 | {"num_kv_shared_layers": 4, "use_double_wide_mlp": True}, {}),
    "gemma4 of keys as values": (
        "gemma4", "gemma4_text", GEMMA4 | KEYS_AS_VALUES | {"hidden_size_per_layer_input": 0}, {}
    ),
    "gemma4 of both": ("gemma4", "gemma4_text", GEMMA4 | KEYS_AS_VALUES | {"num_kv_shared_layers": 2}, {}),
    "phi2": ("phi2", "phi", {}, {"rope.dimension_count": 8}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None, "tie_word_embeddings": True}, {}),
}  # fmt: skip
ALWAYS = ("granite", "olmo3", "phi3 of long rows", "gpt2", "glm4", "qwen35 of more values than keys", "gemma4")
EVERY = [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.long) for case in CASES]


def model_of(family: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers, whose norms and biases matter."""
    torch.manual_seed(3)
    sizes = settings if family == "gpt2" else SIZES | settings
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias") or ".ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.mul_(5.0)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = None
    return model


def equal_where_converted(folder: Path, model: Any, compare: Any) -> None:
    """The converted folder computes what the model does that the file was written from."""
    engine = compare.engine(folder)
    prompt = compare.prompt(40, engine)
    compare.equal_everywhere(engine, prompt, compare.generate(model, prompt))


@pytest.mark.parametrize("case", EVERY)
def test_a_file_gives_the_logits_of_the_model_it_was_written_from(case: str, tmp_path: Path, compare: Any) -> None:
    architecture, family, settings, keys = CASES[case]
    model = model_of(family, settings)
    convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")
    engine = compare.engine(tmp_path / "model")
    for num_tokens in (5, 70):
        prompt = compare.prompt(num_tokens, engine)
        compare.equal_everywhere(engine, prompt, compare.generate(model, prompt))


def as_converted(folder: Path, target: Path, model: Any, architecture: str) -> Path:
    """The pairs of a PEFT folder as llama.cpp's `convert_lora_to_gguf.py` writes them: named by gguf-py's table, with
    the rows of each B where the converter moves those of the weight.
    """
    names = gguf.get_tensor_name_map(NUMBERS[architecture], model.config.num_hidden_layers)
    found: dict[str, Any] = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        module, _, half = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        weight = names.get_name(module)
        assert weight is not None, module
        if half == "B":
            _, rows = moved(f"{module}.weight", np.arange(len(value))[:, None], model.config, architecture)
            value = value[rows[:, 0]]
        found[f"{weight}.weight.lora_{half.lower()}"] = np.ascontiguousarray(value)
    write_gguf(target / "adapter.gguf", architecture, found, adapter__lora__alpha=8.0)
    return target


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("gpt2", "granite 4")])
def test_an_adapter_for_a_model_of_an_architecture_is_the_one_of_peft(case: str, tmp_path: Path) -> None:
    architecture, family, settings, _ = CASES[case]
    model = model_of(family, settings)
    model.save_pretrained(tmp_path / "base")
    config = read_model_config(tmp_path / "base")
    folder = write_random_adapter(tmp_path / "peft", config, 4, 5)
    pairs = load_file(folder / "adapter_model.safetensors")
    # whose columns the converter moves in models, and cannot move in adapters
    pairs = {key: value for key, value in pairs.items() if "linear_attn.out_proj" not in key}
    save_file(pairs, folder / "adapter_model.safetensors")
    raw = json.loads((folder / "adapter_config.json").read_text())
    raw["target_modules"] = [name for name in raw["target_modules"] if any(f".{name}.lora" in key for key in pairs)]
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    expected = audit_adapter(folder, config, "peft")
    audit = audit_adapter(as_converted(folder, tmp_path / "gguf", model, architecture), config, "gguf")
    assert audit.verdict == expected.verdict == "exact", audit.reasons
    assert len(audit.sites) == len(pairs) // 2
    assert audit.content_sha256 == expected.content_sha256


@pytest.mark.parametrize(
    ("case", "weight", "said"),
    [
        ("gpt2", "blk.0.attn_output", "adapters in GGUF are not read for a base of gpt2"),
        ("qwen35 of more values than keys", "blk.0.ssm_out", "not a pair of a linear layer of qwen3_5_text"),
        ("gemma4", "blk.0.per_layer_model_proj", "not a pair of a linear layer of gemma4_text"),
        ("glm4", "per_layer_model_proj", "not a pair of a linear layer of glm4"),
    ],
)
def test_adapters_that_the_converter_cannot_write_are_refused(
    case: str, weight: str, said: str, tmp_path: Path
) -> None:
    architecture, family, settings, _ = CASES[case]
    model_of(family, settings).save_pretrained(tmp_path / "base")
    pair = {f"{weight}.weight.lora_{half}": np.ones((64, 64), np.float32) for half in "ab"}
    write_gguf(tmp_path / "gguf" / "adapter.gguf", architecture, pair, adapter__lora__alpha=8.0)
    audit = audit_adapter(tmp_path / "gguf", read_model_config(tmp_path / "base"), "gguf")
    assert audit.verdict == "refused"
    assert any(said in reason for reason in audit.reasons), audit.reasons


def test_every_architecture_has_a_case() -> None:
    tested = {architecture for architecture, *_ in CASES.values()}
    assert tested | {"qwen2", "gemma", "gemma2"} == ARCHITECTURES.keys()


# Tensors that gguf-py lists for an architecture, and that files of the dense models that are served do not have. Their
# names are refused.
OF_OTHERS = re.compile(
    r"(ffn_.*exps|ffn_.*shexp|ffn_gate_inp|ssm_.*|nextn\..*|attn_rot_embd|(pre|post)_ffw_norm_[12])$"
)
OTHER_FORMS = {"phi2": {"ffn_norm"}, "phi3": {"attn_q", "attn_k", "attn_v"}}


def readable(architecture: str) -> Iterator[str]:
    """Stems of the tensors that are read."""
    read = ARCHITECTURES[architecture]
    for name in {read.family, *([read.other[1]] if read.other else [])}:
        family = FAMILIES[name]
        yield from ("token_embd", "output_norm", "output", *(["position_embd"] if family.names.positions else []))
        yield from norm_names(architecture, family)
        for site, modules in family.names.sites.items():
            yield from SITES[site, len(modules)]
        yield from ("attn_qkv",)
        yield from (stem for tensor in DELTA.values() if (stem := tensor.partition(".")[0]) and family.has_delta_layers)
        if family.has_layer_inputs:
            yield from ("layer_output_scale", "per_layer_token_embd", "per_layer_proj_norm")
        yield from ("rope_freqs", *(["rope_factors_long", "rope_factors_short"] if name == "phi3" else []))


@pytest.mark.reference("gguf")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_an_architecture_is_read_or_refused(architecture: str) -> None:
    listed = {gguf.TENSOR_NAMES[kind].removeprefix("blk.{bid}.") for kind in gguf.MODEL_TENSORS[NUMBERS[architecture]]}
    others = {name for name in listed if OF_OTHERS.match(name)} | OTHER_FORMS.get(architecture, set())
    assert listed - set(readable(architecture)) == others - set(readable(architecture))
    # a head of its own, fused rows and rotary factors may stand in any file
    anywhere = {"output", "attn_qkv", "rope_freqs"}
    assert set(readable(architecture)) - listed <= anywhere


@pytest.mark.reference("gguf")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_gguf(architecture: str) -> None:
    names = gguf.get_tensor_name_map(NUMBERS[architecture], 1)
    read = ARCHITECTURES[architecture]
    family = FAMILIES[read.family].names
    for ours, theirs in norm_names(architecture, FAMILIES[read.family]).items():
        assert names.get_name(f"{family.layers}.0.{theirs}") == f"blk.0.{ours}"
    for site, modules in family.sites.items():
        for ours, theirs in zip(SITES[site, len(modules)], modules, strict=True):
            if site == "all_inputs":
                assert names.get_name(theirs) == ours
            else:
                assert names.get_name(f"{family.layers}.0.{theirs}") == f"blk.0.{ours}"
    assert names.get_name(family.embedding) == "token_embd"
    assert names.get_name(family.final_norm) == "output_norm"
    for theirs, ours in DELTA.items() if family.delta else ():
        # the converter gives this one another name first
        module = theirs.replace("dt_bias", "dt_proj").removesuffix(".weight")
        assert names.get_name(f"{family.layers}.0.{family.delta}.{module}") == f"blk.0.{ours.partition('.')[0]}"
    if family.layer_scalar:
        assert names.get_name(f"{family.layers}.0.{family.layer_scalar}") == "blk.0.layer_output_scale"
    if family.layer_inputs is not None:
        assert names.get_name(family.layer_inputs.table) == "per_layer_token_embd"
        assert names.get_name(family.layer_inputs.norm) == "per_layer_proj_norm"


@pytest.mark.parametrize(
    ("case", "keys", "said"),
    [
        ("glm4", {"nextn_predict_layers": 1}, r"nextn_predict_layers=1: not supported"),
        ("glm4", {"rope.dimension_sections": [2, 3, 3, 0]}, "dimension_sections: not supported"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned=false"),
        ("granite", {"expert_count": 4}, r"expert_count=4: not supported"),
        ("mistral3 growing", {"rope.scaling.yarn_ext_factor": 0.0}, r"yarn_ext_factor=0\.0"),
        ("olmo3", {"attention.sliding_window_pattern": [True]}, "expected 4 times true or false"),
        ("phi3", {"rope.scaling.attn_factor": 2.0, "rope.scaling.type": "su"}, r"rope\.scaling\.type='su'"),
        ("smollm3", {"attention.sliding_window": 8}, r"sliding_window=8: not supported"),
        ("qwen35", {"attention.recurrent_layers": [True]}, "recurrent_layers=.*: expected 4 times true or false"),
        ("qwen35", {"ssm.inner_size": 31}, r"ssm\.inner_size=31: expected a multiple of ssm\.time_step_rank=2"),
        ("qwen35", {"full_attention_interval": 0}, r"full_attention_interval=0: expected a number of layers"),
        ("qwen35", {"attention.sliding_window": 16}, r"sliding_window=16: not supported"),
        ("gemma4", {"expert_count": 8, "expert_used_count": 2}, r"expert_count=8: not supported"),
        ("gemma4", {"rope.scaling.factor": 8.0}, r"rope\.scaling\.factor=8\.0: not supported"),
        ("gemma4", {"attention.value_length_swa": 8}, r"value_length_swa=8: expected attention\.key_length_swa=16"),
        ("gemma4", {"attention.shared_kv_layers": 6}, r"shared_kv_layers=6: expected less than 6 layers"),
        ("gemma4", {"feed_forward_length": [96] * 5 + [48]}, "feed_forward_length=.*expected 96 in all layers, or"),
        ("gemma4", {"attention.head_count_kv": [2, 1] * 3}, "expected one number for all layers where keys are not"),
        ("gemma4", {"attention.sliding_window_pattern": 6}, "sliding_window_pattern=6: expected 6 times true or false"),
        ("gemma4", {"attention.sliding_window_pattern": [True] * 6}, "expected false for the last layer"),
        ("gemma4", {"embedding_length_per_layer_input": 0}, "tensors with no place in a gemma4 model: blk.0.inp_gate"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(case: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    architecture, family, settings, known = CASES[case]
    path = write_as_converted(tmp_path / "m.gguf", model_of(family, settings), architecture, known | keys)
    with pytest.raises(EngineError, match=said):
        convert_gguf(path, tmp_path / "model")


def renamed(model: Any, **names: str) -> Any:
    """The model without some tensors of its state."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not re.search(names["without"], name)}
    model.state_dict = lambda: state
    return model


@pytest.mark.parametrize(
    ("case", "without", "error", "said"),
    [
        ("llama", r"o_proj\.bias", EngineError, "biases on attn_q, attn_k, attn_v without those on attn_output"),
        ("llama", r"1\.self_attn\.k_proj\.bias", ModelFilesError, r"missing tensors: blk\.1\.attn_k\.bias"),
        ("starcoder2", r"1\.input_layernorm\.bias", ModelFilesError, r"missing tensors: blk\.1\.attn_norm\.bias"),
        ("gpt2", r"wpe", ModelFilesError, r"missing tensors: position_embd\.weight"),
        ("command-r with norms of heads", r"k_norm", ModelFilesError, r"blk\.0\.attn_k_norm\.weight"),
        ("qwen35", r"1\.linear_attn\.A_log", ModelFilesError, r"missing tensors: blk\.1\.ssm_a"),
        ("gemma4", r"2\.layer_scalar", ModelFilesError, r"missing tensors: blk\.2\.layer_output_scale\.weight"),
        ("gemma4 of keys as values", r"0\.self_attn\.v_proj", ModelFilesError, r"missing tensors: blk\.0\.attn_v"),
    ],
)
def test_a_part_of_what_a_family_may_have_is_refused(
    case: str, without: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    architecture, family, settings, keys = CASES[case]
    model = renamed(model_of(family, settings), without=without)
    with pytest.raises(error, match=said):
        convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")


LONG_QUANTISED = ("chatglm", "qwen35 of more values than keys", "qwen35 of whole groups", "gemma4", "gemma4 of both")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    "case", ["granite", "gpt2", *(pytest.param(case, marks=pytest.mark.long) for case in LONG_QUANTISED)]
)
def test_quantised_files_are_read_as_their_exact_values(case: str, kind: str, tmp_path: Path, compare: Any) -> None:
    """Rows of blocks are reordered as rows of numbers are; GPT-2's are transposed, as numbers."""
    architecture, family, settings, keys = CASES[case]
    model = model_of(family, settings)
    of_kind = GGMLQuantizationType[kind]
    convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys, of_kind), tmp_path / "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            transposed = architecture == "gpt2" and ".h." in name
            is_quantised = parameter.shape[0 if transposed else -1] % 32 == 0 and parameter.ndim == 2
            if is_quantised and "norm" not in name:
                rows = (parameter.T if transposed else parameter).contiguous().numpy()
                columns = value_order(model.config)[1] if "linear_attn.out_proj" in name else slice(None)
                exact = torch.from_numpy(gguf.dequantize(gguf.quantize(rows[:, columns], of_kind), of_kind))
                (parameter.T if transposed else parameter)[:, columns] = exact
            # beside weights in blocks, embeddings and norms are in fp16, and so are blocks that would be cut
            in_fp16 = "embed" in name or "wte" in name or "wpe" in name or not is_quantised or transposed
            is_cut = "more values than keys" in case and "out_proj" in name
            if (in_fp16 or is_cut) and not name.endswith(("A_log", "dt_bias")):
                parameter.copy_(parameter.half().float())
        for buffer in model.buffers():
            if buffer.shape == (1,):  # factors of layers
                buffer.copy_(buffer.half().float())
    engine = compare.engine(tmp_path / "model")
    prompt = compare.prompt(40, engine)
    _, logits = compare.record(engine, prompt)
    expected = compare.generate(model, prompt).logits
    assert (logits - expected).abs().max() < 5e-3


@pytest.mark.parametrize("case", ["chatglm", "qwen3 with biases"])
def test_queries_keys_and_values_may_be_one_tensor(
    case: str, tmp_path: Path, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older files of GLM-4 have them so."""
    import gguf_writer
    import numpy as np

    architecture, family, settings, keys = CASES[case]
    model = model_of(family, settings)
    tensors = dict(gguf_writer._tensors(model, architecture))
    for block in range(2):
        for part in ("weight", "bias"):
            rows = [tensors.pop(f"blk.{block}.attn_{site}.{part}") for site in "qkv"]
            tensors[f"blk.{block}.attn_qkv.{part}"] = np.concatenate(rows)
    monkeypatch.setattr(gguf_writer, "_tensors", lambda *_: tensors.items())
    convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")
    equal_where_converted(tmp_path / "model", model, compare)


def test_layers_that_predict_further_tokens_are_passed_over(
    tmp_path: Path, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come behind the others, and count as layers of the file."""
    import gguf_writer

    architecture, family, settings, keys = CASES["qwen35"]
    model = model_of(family, settings)
    tensors = dict(gguf_writer._tensors(model, architecture))
    further = {name.replace("blk.3.", "blk.4."): array for name, array in tensors.items() if name.startswith("blk.3.")}
    further |= {"blk.4.nextn.eh_proj.weight": tensors["blk.3.ffn_gate.weight"]}
    monkeypatch.setattr(gguf_writer, "_tensors", lambda *_: (tensors | further).items())
    keys = keys | {"block_count": 5}
    with pytest.raises(EngineError, match=r"tensors with no place in a qwen35 model: blk\.4\.attn_k\.weight"):
        convert_gguf(write_as_converted(tmp_path / "n.gguf", model, architecture, keys), tmp_path / "none")
    keys |= {"nextn_predict_layers": 1}
    convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")
    equal_where_converted(tmp_path / "model", model, compare)


def test_keys_and_values_that_a_layer_does_not_read_are_passed_over(
    tmp_path: Path, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published checkpoints of Gemma 4 have some for layers that share those of others."""
    import gguf_writer

    architecture, family, settings, keys = CASES["gemma4"]
    model = model_of(family, settings)
    tensors = dict(gguf_writer._tensors(model, architecture))
    unread = {f"blk.4.attn_{part}.weight": tensors[f"blk.0.attn_{part}.weight"] for part in ("k", "v", "k_norm")}
    monkeypatch.setattr(gguf_writer, "_tensors", lambda *_: (tensors | unread).items())
    convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")
    equal_where_converted(tmp_path / "model", model, compare)


@pytest.mark.parametrize(
    ("case", "key", "value", "said"),
    [
        ("qwen35", "embedding_length", 32, r"token_embd\.weight has shape \[272, 64\], and metadata says \[272, 32\]"),
        (
            "qwen35",
            "ssm.conv_kernel",
            3,
            r"blk\.0\.ssm_conv1d\.weight has shape \[96, 4\], and metadata says \[96, 3\]",
        ),
        ("qwen35", "attention.head_count", 2**31, r"blk\.3\.attn_q\.weight has shape \[256, 64\]"),
        ("gemma4", "feed_forward_length", 48, r"blk\.0\.ffn_gate\.weight has shape \[96, 64\]"),
        ("gemma4", "embedding_length_per_layer_input", 9, r"metadata says \[272, 54\]"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused(
    case: str, key: str, value: int, said: str, tmp_path: Path
) -> None:
    architecture, family, settings, keys = CASES[case]
    path = write_as_converted(tmp_path / "m.gguf", model_of(family, settings), architecture, keys | {key: value})
    with pytest.raises(ModelFilesError, match=said):
        convert_gguf(path, tmp_path / "model")


@pytest.mark.parametrize("factors", [[1.0] * 4 + [2.0] * 12, [1.0] * 8, [1e30] * 16, [1.0, 1e30] * 8])
def test_other_factors_of_frequencies_are_refused(
    factors: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf_writer
    import numpy as np

    architecture, family, settings, keys = CASES["gemma4"]
    model = model_of(family, settings)
    tensors = dict(gguf_writer._tensors(model, architecture)) | {"rope_freqs.weight": np.array(factors, np.float32)}
    monkeypatch.setattr(gguf_writer, "_tensors", lambda *_: tensors.items())
    with pytest.raises(EngineError, match=r"rope_freqs\.weight: expected 16 numbers, first 1 and then 1e30"):
        convert_gguf(write_as_converted(tmp_path / "m.gguf", model, architecture, keys), tmp_path / "model")


# Cases that llama.cpp does not read, or in which it leaves out what the model has.
NOT_IN_LLAMA_CPP = {
    "qwen3 with biases": "it reads no biases",
    "qwen3vl": "it asks for more layers than images are mixed into",
    "seed_oss": "it reads no bias of attention's output",
    "command-r with norms of heads": "it reads these from 64 layers on",
    "phi3": "it leaves windows out",
    "exaone4": "it leaves windows out but with 64 layers",
    "qwen35 of listed layers": "it takes values of another size than keys",
    "olmo3": "it takes another temperature of YaRN than the model's",
}


def likeliest(path: Path, prompt: list[int]) -> list[tuple[int, float]]:
    """llama.cpp's likeliest tokens behind a prompt, with their log-probabilities; none where the first token is a part
    of a character.
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_parallel, parameters.n_ctx, parameters.port, parameters.verbosity = 1, 128, 0, -1
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # flash attention rounds, which moves these models' logits by 0.03
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 100, "ignore_eos": True}
    request = HttpRequest(f"{server.listening_address}/completion", json.dumps(asked).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=60) as reply:
        found = json.load(reply).get("completion_probabilities", [])
    return [(token["id"], token["logprob"]) for token in found[0]["top_logprobs"]] if found else []


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")
@pytest.mark.parametrize("case", sorted(CASES.keys() - NOT_IN_LLAMA_CPP.keys()))
def test_llama_cpp_computes_the_same_from_these_files(case: str, tmp_path: Path) -> None:
    """The writer writes what llama.cpp's converter does: else llama.cpp would compute another model."""
    architecture, family, settings, keys = CASES[case]
    model = model_of(family, settings)
    path = write_as_converted(tmp_path / "m.gguf", model, architecture, keys)
    for seed in range(10):
        prompt = random.Random(seed).choices(range(3, 260), k=60)
        if found := likeliest(path, prompt):
            break
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    assert len(found) == 100
    assert max(abs(float(expected[token]) - logprob) for token, logprob in found if logprob > -12) < 0.02
