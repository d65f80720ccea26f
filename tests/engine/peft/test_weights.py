"""Merged values and unmerged pairs against PEFT's own forward pass, for every kind of adapter it can save."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.peft.weights import AdapterWeights, load_adapter

TOLERANCE = 2e-4  # fp32; logits of the tiny bases go up to about 60

EXACT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.1\..*(q|down)_proj"},
    "rslora": {"use_rslora": True, "r": 4},
    "rank and alpha patterns": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 3, r"model\.layers\.1\..*up_proj": 7, "layers.1.self_attn.q_proj": 5},
        "alpha_pattern": {"q_proj": 3, "^model.layers.0.*k_proj": 11},
    },
    "patterns with rslora": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {".*0.mlp.down_proj": 1},
        "use_rslora": True,
    },
    "one layer": {"layers_to_transform": 1},
    "layers and pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "model.layers.0.self_attn.q_proj"]},
    "excluded by regex": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.0.*v_proj"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "gaussian start": {"init_lora_weights": "gaussian"},
    "orthogonal start": {"init_lora_weights": "orthogonal"},
    "mica start": {"init_lora_weights": "mica"},
    "dropout": {"lora_dropout": 0.5},
    "targets of other models too": {"target_modules": ["q_proj", "c_attn"]},
    "weight tying asked for in vain": {"ensure_weight_tying": True},
}

BY_MERGE: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "target_modules": "all-linear"},
    "dora with rslora": {"use_dora": True, "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding and head": {"target_modules": r".*(embed_tokens|lm_head|q_proj)"},
    "dora on embedding and head": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "embedding, tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "head, tied": {"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True},
    "saved head and norms": {"modules_to_save": ["lm_head", "norm"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved embedding, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head, tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "saved block": {"modules_to_save": ["mlp", "k_proj"]},
    "tokens": {"trainable_token_indices": [7, 3]},
    "tokens of both": {"trainable_token_indices": {"embed_tokens": [1, 3], "lm_head": [4]}},
    "same tokens of both": {"trainable_token_indices": {"embed_tokens": [1, 3], "lm_head": [1, 3]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [9]}},
    "added tokens": {"vocab_size": 35, "trainable_token_indices": [32, 34]},
    "larger vocabulary": {"vocab_size": 35},
    "larger vocabulary, adapted": {"vocab_size": 35, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "larger vocabulary, saved": {"vocab_size": 35, "modules_to_save": ["embed_tokens", "lm_head"]},
    "smaller vocabulary": {"vocab_size": 30, "modules_to_save": ["lm_head"]},
}
BASES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("qwen3", True)]


def merged_model(trained: Any, weights: AdapterWeights) -> Any:
    """A plain untied transformers model that holds the effective value of every parameter."""
    audit = weights.audit
    config = copy.deepcopy(trained.base.model.config)
    config.tie_word_embeddings = False
    config.vocab_size = audit.vocab_size
    model = type(trained.base.model)(config)
    pristine = trained.base.model.state_dict()
    left = set(audit.touched_parameters)
    for name, parameter in list(model.named_parameters()):
        parameter.data = weights.effective(name, pristine[name])
        left.discard(name)
    for name in left:
        module = model.get_submodule(name.removesuffix(".bias"))
        module.bias = nn.Parameter(weights.effective(name, torch.zeros(module.out_features)))
    return model


def with_pairs(trained: Any, weights: AdapterWeights) -> Any:
    """The base with `scaling * (x Aᵀ) Bᵀ` added to each adapted layer's output."""
    model = trained.base.fresh()
    for module, pair in weights.lora.items():

        def add(_: Any, inputs: Any, output: Any, pair: Any = pair) -> Any:
            return output + pair.scaling * (inputs[0] @ pair.a.T) @ pair.b.T

        model.get_submodule(module).register_forward_hook(add)
    return model


def load(trained: Any) -> AdapterWeights:
    return load_adapter(trained.audit(), "cpu")


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < TOLERANCE


def assert_changes_something(trained: Any, expected: Any, logits: Callable[..., Any]) -> None:
    base = logits(trained.base.model, min(trained.vocab_size, 32))
    width = base.shape[-1]
    assert (expected[:, :width, :width] - base[:, : expected.shape[1], : expected.shape[2]]).abs().max() > 0.01


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT.keys())
@pytest.mark.parametrize(("family", "is_tied"), BASES)
def test_plain_pairs_equal_peft_both_merged_and_unmerged(
    bases: Any, train: Any, logits: Any, family: str, is_tied: bool, settings: dict[str, Any]
) -> None:
    trained = train(bases(family, is_tied), **settings)
    weights = load(trained)
    assert (weights.audit.verdict, weights.audit.reasons) == ("exact", ())
    expected = trained.logits()
    assert_changes_something(trained, expected, logits)
    assert_close(logits(with_pairs(trained, weights), 32), expected)
    assert_close(logits(merged_model(trained, weights), 32), expected)


@pytest.mark.parametrize("settings", BY_MERGE.values(), ids=BY_MERGE.keys())
@pytest.mark.parametrize(("family", "is_tied"), BASES)
def test_all_other_adapters_equal_peft_when_merged(
    bases: Any, train: Any, logits: Any, family: str, is_tied: bool, settings: dict[str, Any]
) -> None:
    trained = train(bases(family, is_tied), **settings)
    audit = trained.audit()
    weights = load(trained)
    assert audit.verdict == "exact-by-merge"
    assert all(reason.startswith("adapter 'zoo': ") for reason in audit.reasons)
    expected = trained.logits()
    assert_changes_something(trained, expected, logits)
    assert_close(logits(merged_model(trained, weights), trained.vocab_size), expected)


OTHER_FAMILIES = ("mistral", "gemma", "gemma2", "gemma3_text", "phi3", "opt")


@pytest.mark.parametrize("targets", ["all-linear", ["down_proj", "o_proj", "fc2", "out_proj"]], ids=["all", "outputs"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_plain_pairs_equal_peft_in_every_family(bases: Any, train: Any, logits: Any, family: str, targets: Any) -> None:
    trained = train(bases(family, False), target_modules=targets, use_rslora=True)
    weights = load(trained)
    assert_close(logits(merged_model(trained, weights), 32), trained.logits())
    # This OPT projects its embeddings, and pairs outside the decoder's layers are not batched.
    is_batched = (family, targets) != ("opt", "all-linear")
    assert weights.audit.verdict == ("exact" if is_batched else "exact-by-merge")
    if is_batched:
        assert_close(logits(with_pairs(trained, weights), 32), trained.logits())


@pytest.mark.parametrize("name", ["dora", "embedding and head", "saved head and norms", "saved embedding", "tokens"])
@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_all_other_adapters_equal_peft_in_every_family(
    bases: Any, train: Any, logits: Any, family: str, is_tied: bool, name: str
) -> None:
    settings = {"target_modules": "all-linear"} | BY_MERGE[name]
    if name == "embedding and head":
        settings["target_modules"] = r".*(embed_tokens|lm_head|o_proj|out_proj)"
    trained = train(bases(family, is_tied), **settings)
    weights = load(trained)
    assert weights.audit.verdict == "exact-by-merge"
    assert_close(logits(merged_model(trained, weights), 32), trained.logits())


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_trained_biases_replace_those_of_the_base(
    bases: Any, train: Any, logits: Any, is_tied: bool, bias: str
) -> None:
    trained = train(bases("qwen2", is_tied), bias=bias, target_modules=["q_proj", "o_proj"])
    weights = load(trained)
    assert weights.audit.verdict == "exact-by-merge"
    assert_close(logits(merged_model(trained, weights), 32), trained.logits())


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_of_a_base_without_any_are_nothing(llama: Any, train: Any, bias: str) -> None:
    assert train(llama, bias=bias).audit().verdict == "exact"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_bias_of_lora_b_is_scaled_and_added_even_where_the_base_has_none(
    bases: Any, train: Any, logits: Any, family: str
) -> None:
    trained = train(bases(family, False), lora_bias=True, target_modules=["q_proj", "down_proj"])
    weights = load(trained)
    assert weights.audit.verdict == "exact-by-merge"
    assert "model.layers.1.mlp.down_proj.bias" in weights.audit.touched_parameters
    assert_close(logits(merged_model(trained, weights), 32), trained.logits())


@pytest.mark.parametrize("name", ["dora", "embedding and head", "saved block", "larger vocabulary, adapted"])
def test_effective_values_equal_peft_merge_and_unload(llama: Any, train: Any, name: str) -> None:
    trained = train(llama, **BY_MERGE[name])
    weights = load(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained.model.merge_and_unload().state_dict()
    pristine = llama.model.state_dict()
    assert set(weights.audit.touched_parameters) <= expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(weights.effective(parameter, pristine[parameter]), value, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_storage_is_computed_in_fp32(plain: Any, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    file = plain.folder / "adapter_model.safetensors"
    stored = {key: value.to(dtype) for key, value in load_file(file).items()}
    save_file(stored, file)
    weights = load(plain)
    name = "model.layers.0.self_attn.k_proj"
    pristine = plain.base.model.state_dict()[f"{name}.weight"]
    a, b = (stored[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
    expected = pristine.double() + 2.5 * b @ a
    torch.testing.assert_close(weights.effective(f"{name}.weight", pristine).double(), expected, atol=1e-6, rtol=1e-5)


def test_a_merged_value_is_rounded_once(plain: Any) -> None:
    weights = load(plain)
    name = "model.layers.0.self_attn.k_proj.weight"
    pristine = plain.base.model.state_dict()[name].bfloat16()
    exact = weights.effective(name, pristine.float())
    found = weights.effective(name, pristine)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


def test_the_pristine_value_is_left_alone_and_untouched_parameters_come_back_as_given(plain: Any) -> None:
    weights = load(plain)
    state = plain.base.model.state_dict()
    before = state["model.layers.0.self_attn.q_proj.weight"].clone()
    weights.effective("model.layers.0.self_attn.q_proj.weight", state["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], before)
    assert weights.effective("model.norm.weight", state["model.norm.weight"]) is state["model.norm.weight"]


def test_pairs_come_contiguous_in_the_stored_type(plain: Any) -> None:
    weights = load_adapter(plain.audit(), "cpu")
    assert len(weights.lora) == 8
    for pair in weights.lora.values():
        assert pair.a.dtype == pair.b.dtype == torch.float32
        assert pair.a.is_contiguous()
        assert pair.b.is_contiguous()
        assert pair.a.shape[0] == pair.b.shape[1] == pair.rank == 2


def test_an_adapter_exact_by_merge_does_not_hand_out_its_pairs(llama: Any, train: Any) -> None:
    weights = load(train(llama, use_dora=True))
    with pytest.raises(AdapterRefusedError, match=r"adapter 'zoo': verdict exact-by-merge, it cannot run unmerged"):
        _ = weights.lora


def test_a_refused_adapter_does_not_load(plain: Any) -> None:
    plain.configure(r=3)
    with pytest.raises(AdapterRefusedError, match=r"adapter 'zoo': .*has rank 2, expected 3"):
        load(plain)


def test_an_adapter_whose_values_were_not_audited_does_not_load(plain: Any) -> None:
    with pytest.raises(AdapterRefusedError, match="values were not audited"):
        load_adapter(plain.audit(check_values=False), "cpu")


@pytest.mark.parametrize("change", ["value", "name"])
def test_files_that_changed_after_the_audit_do_not_load(plain: Any, change: str) -> None:
    audit = plain.audit()
    tensors = plain.tensors()
    key = next(iter(tensors))
    if change == "value":
        tensors[key] = tensors[key] + np.float32(1)
    else:
        tensors["renamed"] = tensors.pop(key)
    plain.write(tensors)
    with pytest.raises(AdapterRefusedError, match="since"):
        load_adapter(audit, "cpu")


def test_a_merge_that_overflows_is_refused_and_not_served(plain: Any) -> None:
    tensors = plain.tensors()
    plain.write({key: value * np.float32(1e4) for key, value in tensors.items()})
    weights = load(plain)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(AdapterRefusedError, match=rf"{name} merged in torch.float16 is not finite"):
        weights.effective(name, plain.base.model.state_dict()[name].half())


def test_a_pristine_value_of_another_shape_is_a_mistake(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"pristine value has shape \[3, 3\], audited \[16, 16\]"):
        load(plain).effective("model.layers.0.self_attn.q_proj.weight", torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("name", "is_tied", "expected"),
    [
        ("embedding", True, True),
        ("embedding", False, False),
        ("saved embedding", True, True),
        ("saved embedding, tied", True, False),
        ("tokens", True, False),
        ("tokens of both", True, True),
        ("larger vocabulary", True, False),
        ("saved block", True, False),
    ],
)
def test_the_audit_says_when_embedding_and_tied_head_part(
    bases: Any, train: Any, name: str, is_tied: bool, expected: bool
) -> None:
    trained = train(bases("llama", is_tied), **BY_MERGE[name])
    weights = load(trained)
    assert weights.audit.unties_embeddings is expected
    pristine = trained.base.model.state_dict()
    pair = [weights.effective(f"{module}.weight", pristine[f"{module}.weight"]) for module in TABLES]
    assert torch.equal(pair[0], pair[1]) is (is_tied and not expected)


TABLES = ("model.embed_tokens", "lm_head")
