"""Pairs against base and configuration: whatever does not fit together is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from lorabatch.engine.peft import audit_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def reasons(trained: Any) -> str:
    audit = trained.audit()
    assert audit.verdict == "refused"
    assert all(reason.startswith("adapter 'zoo': ") for reason in audit.reasons)
    return "\n".join(audit.reasons)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_missing_partner_is_refused(plain: Any, part: str) -> None:
    tensors = plain.tensors()
    del tensors[f"{Q}.{part}.weight"]
    plain.write(tensors)
    text = reasons(plain)
    missing = part.lower()
    assert f"its partner {missing} is missing" in text
    assert f"{Q}." in text


def test_a_rank_other_than_configured_is_refused(plain: Any) -> None:
    plain.configure(r=4)
    text = reasons(plain)
    assert "has rank 2, expected 4 by r, rank_pattern of the configuration" in text
    assert "(and 15 more like it)" in text


def test_a_rank_pattern_that_does_not_fit_the_tensors_is_refused(plain: Any) -> None:
    plain.configure(rank_pattern={"layers.1.self_attn.q_proj": 8})
    assert f"{Q.replace('layers.0', 'layers.1')}.lora_A.weight: has rank 2, expected 8" in reasons(plain)


def test_partners_of_different_ranks_are_refused(plain: Any) -> None:
    plain.write(plain.tensors() | {f"{Q}.lora_B.weight": np.ones((16, 3), np.float32)})
    assert f"{Q}.lora_B.weight: has shape [16, 3], expected [16, 2]" in reasons(plain)


@pytest.mark.parametrize("shape", [(2,), (2, 16, 1), (16, 2), (0, 16), ()])
def test_an_odd_shape_is_refused(plain: Any, shape: tuple[int, ...]) -> None:
    plain.write(plain.tensors() | {f"{Q}.lora_A.weight": np.ones(shape, np.float32)})
    assert f"{Q}.lora_A.weight: has " in reasons(plain)


def test_a_target_without_tensors_is_refused(plain: Any) -> None:
    plain.configure(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    text = reasons(plain)
    assert "model.layers.0.mlp.up_proj: the configuration targets it but the file has no tensors" in text
    assert "(and 1 more like it)" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "k_proj", "v_proj"]},
        {"target_modules": r".*(q|k|v)_proj"},
        {"exclude_modules": ["o_proj"]},
        {"layers_to_transform": [0]},
        {"target_modules": None},
        {"target_modules": []},
    ],
)
def test_tensors_outside_the_targets_are_refused(plain: Any, changes: dict[str, Any]) -> None:
    plain.configure(**changes)
    assert "not among the modules the configuration targets" in reasons(plain)


def test_all_linear_written_literally_is_understood(train: Any, llama: Any) -> None:
    trained = train(llama, target_modules="all-linear")
    trained.configure(target_modules="all-linear")
    assert trained.audit().verdict == "exact"
    trained.configure(target_modules="all-linear", exclude_modules=["q_proj"])
    assert "not among the modules" in reasons(trained)


def test_a_target_no_module_of_the_base_has_is_reported(plain: Any) -> None:
    plain.configure(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "c_attn"])
    audit = plain.audit()
    assert audit.verdict == "exact"
    assert audit.notes == ("target_modules names c_attn, which this base does not have; PEFT ignores them too",)


def test_dora_without_magnitude_is_refused(plain: Any) -> None:
    plain.configure(use_dora=True)
    assert "lora_magnitude_vector: missing, expected because use_dora=True" in reasons(plain)


def test_a_magnitude_without_dora_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, use_dora=True)
    trained.configure(use_dora=False)
    assert "lora_magnitude_vector: not expected, use_dora is not true" in reasons(trained)


def test_a_magnitude_of_another_length_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, use_dora=True)
    trained.write(trained.tensors() | {f"{Q}.lora_magnitude_vector": np.ones(15, np.float32)})
    assert "lora_magnitude_vector: has shape [15], expected [16]" in reasons(trained)


def test_a_bias_of_b_and_its_key_go_together(train: Any, llama: Any) -> None:
    trained = train(llama, lora_bias=True)
    trained.configure(lora_bias=False)
    assert "lora_B.bias: not expected, lora_bias is not true" in reasons(trained)
    trained.configure(lora_bias=True)
    tensors = trained.tensors()
    del tensors[f"{Q}.lora_B.bias"]
    trained.write(tensors)
    assert "lora_B.bias: missing, expected because lora_bias=True" in reasons(trained)


def test_a_linear_pair_on_the_embedding_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, target_modules=["embed_tokens", "q_proj"])
    trained.rename(lambda key: key.replace("lora_embedding_A", "lora_A.weight"))
    assert "expected embedding_a and embedding_b for this kind of layer" in reasons(trained)


@pytest.mark.parametrize("tensor", ["lora_A.weight", "lora_B.weight"])
def test_tied_pairs_that_differ_are_refused(bases: Any, train: Any, tensor: str) -> None:
    trained = train(bases("llama", True), target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    tensors = trained.tensors()
    key = f"base_model.model.lm_head.{tensor}"
    tensors[key] = tensors[key] + np.float32(1)
    trained.write(tensors)
    assert f"{key}: differs from base_model.model.model.embed_tokens.lora_embedding_" in reasons(trained)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_converted_start_is_exact_and_an_unconverted_one_is_refused(
    llama: Any, train: Any, logits: Any, tmp_path: Any, start: str
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from lorabatch.engine.peft.weights import load_adapter

    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=start)
    config.task_type = "CAUSAL_LM"
    torch.manual_seed(3)
    model = get_peft_model(llama.fresh(), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    trained = train(llama)
    model.save_pretrained(trained.folder)
    assert f"init_lora_weights={start!r}: this start changed the base's weights" in reasons(trained)

    expected = logits(model, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(trained.folder, path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    audit = trained.audit()
    assert (audit.verdict, audit.max_rank) == ("exact", 4)
    weights = load_adapter(audit, "cpu")
    merged = llama.fresh()
    for name, parameter in merged.named_parameters():
        parameter.data = weights.effective(name, parameter.data)
    assert (logits(merged, 32) - expected).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        (
            "self_attn.q_proj",
            "self_attn.qkv_proj",
            "it packs self_attn.q_proj and self_attn.k_proj and",
        ),
        ("self_attn.o_proj", "mlp.gate_up_proj", "it packs mlp.gate_proj and mlp.up_proj, which this base has apart"),
        ("self_attn.o_proj", "linear_attn.in_proj_qkv", "of linear attention, which this base does not have. Use the"),
    ],
)
def test_layers_of_other_architectures_are_refused_with_the_difference(
    plain: Any, own: str, named: str, expected: str
) -> None:
    plain.rename(lambda key: key.replace(own, named))
    text = reasons(plain)
    assert f"the base has no linear layer 'model.layers.0.{named}': " in text
    assert expected in text


def test_parts_of_a_layer_that_the_base_has_as_one_are_refused(plain: Any, served_base: Any) -> None:
    phi = served_base("phi3", False).config
    text = "\n".join(audit_adapter(plain.folder, phi, "zoo").reasons)
    assert "_proj': it is a part of self_attn.qkv_proj, which this base has as one layer. Use the base this" in text
    plain.rename(lambda key: key.replace("self_attn.q_proj", "mlp.up_proj"))
    text = "\n".join(audit_adapter(plain.folder, phi, "zoo").reasons)
    assert "mlp.up_proj': it is a part of mlp.gate_up_proj, which this base has as one layer" in text
