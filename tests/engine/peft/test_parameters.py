"""Whole parameters: what PEFT would not load, or what nothing speaks of, is refused by name.

trainable_token_indices: every row has its place, or the adapter is refused by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

P = "base_model.model."
EMBEDDING, HEAD = f"{P}model.embed_tokens", f"{P}lm_head"


def reasons(trained: Any) -> str:
    audit = trained.audit()
    assert audit.verdict == "refused"
    assert all(reason.startswith("adapter 'zoo': ") for reason in audit.reasons)
    return "\n".join(audit.reasons)


def drop(trained: Any, key: str) -> None:
    tensors = trained.tensors()
    del tensors[key]
    trained.write(tensors)


def add(trained: Any, key: str, *shape: int) -> None:
    trained.write(trained.tensors() | {key: np.full(shape, 0.5, np.float32)})


def test_a_saved_module_that_is_missing_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, modules_to_save=["lm_head", "norm"])
    drop(trained, f"{P}model.layers.1.input_layernorm.weight")
    assert "model.layers.1.input_layernorm.weight: missing, expected because modules_to_save names" in reasons(trained)


@pytest.mark.parametrize("name", ["classifier", "qa_outputs"])
def test_a_head_of_another_family_is_refused(plain: Any, name: str) -> None:
    plain.configure(modules_to_save=[name])
    add(plain, f"{P}{name}.weight", 3, 16)
    text = reasons(plain)
    assert f"modules_to_save=('{name}',): '{name}' is a head of another family" in text
    assert f"{P}{name}.weight: the base has no parameter '{name}.weight', and of heads" in text


def test_a_saved_module_the_base_does_not_have_is_reported(plain: Any) -> None:
    plain.configure(modules_to_save=["wte"])
    audit = plain.audit()
    assert audit.verdict == "exact"
    assert audit.notes == ("modules_to_save names 'wte', which this base does not have; PEFT ignores it too",)


def test_a_whole_parameter_that_the_configuration_does_not_name_is_refused(plain: Any) -> None:
    key = f"{P}model.norm.weight"
    add(plain, key, 16)
    assert f"{key}: a whole parameter that neither modules_to_save nor bias speaks of" in reasons(plain)


def test_a_parameter_the_base_does_not_have_is_refused(plain: Any) -> None:
    add(plain, f"{P}model.layers.0.self_attn.rotary.weight", 4)
    assert "the base has no parameter 'model.layers.0.self_attn.rotary.weight'" in reasons(plain)


def test_a_whole_parameter_of_another_shape_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, modules_to_save=["norm"])
    add(trained, f"{P}model.norm.weight", 17)
    assert "model.norm.weight: has shape [17], expected [16]" in reasons(trained)


def test_nan_in_a_whole_parameter_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, modules_to_save=["norm"])
    trained.write(trained.tensors() | {f"{P}model.norm.weight": np.full(16, np.nan, np.float32)})
    assert "model.norm.weight: holds NaN or infinity" in reasons(trained)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_that_are_missing_are_refused(bases: Any, train: Any, bias: str) -> None:
    trained = train(bases("qwen2", False), bias=bias)
    drop(trained, f"{P}model.layers.0.self_attn.q_proj.base_layer.bias")
    assert f"model.layers.0.self_attn.q_proj.bias: missing, expected because bias={bias!r}" in reasons(trained)


def test_biases_that_were_not_to_be_trained_are_refused(bases: Any, train: Any) -> None:
    trained = train(bases("qwen2", False), bias="all")
    trained.configure(bias="none")
    assert "neither modules_to_save nor bias speaks of" in reasons(trained)
    trained.configure(bias="lora_only")
    assert f"{P}model.layers.0.self_attn.k_proj.bias: a whole parameter" in reasons(trained)


def test_a_name_peft_would_pass_over_is_refused(bases: Any, train: Any) -> None:
    trained = train(bases("qwen2", False), bias="lora_only")
    trained.rename(lambda key: key.replace("base_layer.bias", "bias"))
    assert "PEFT would leave this out, as the layer is wrapped by an adapter" in reasons(trained)


def test_a_base_layer_below_no_adapter_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, vocab_size=35)
    trained.rename(lambda key: key.replace("embed_tokens.weight", "embed_tokens.base_layer.weight"))
    assert "PEFT would load this for a layer that is wrapped by an adapter only" in reasons(trained)


def test_a_saved_embedding_in_a_tied_base_stands_for_the_head_too(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True))
    add(trained, f"{EMBEDDING}.weight", 32, 16)
    audit = trained.audit()
    assert audit.verdict == "exact-by-merge"
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(audit.touched_parameters)
    assert not audit.unties_embeddings


def test_two_saved_tables_of_a_tied_base_must_be_equal(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True))
    add(trained, f"{EMBEDDING}.weight", 32, 16)
    add(trained, f"{HEAD}.weight", 32, 16)
    assert trained.audit().verdict == "exact-by-merge"
    trained.write(trained.tensors() | {f"{HEAD}.weight": np.zeros((32, 16), np.float32)})
    assert "expected equal values as both stand for one tied layer" in reasons(trained)


def test_copies_of_a_saved_module_must_be_equal(train: Any, llama: Any) -> None:
    trained = train(llama, vocab_size=35, modules_to_save=["embed_tokens", "lm_head"])
    assert trained.audit().tensor_uses[f"{HEAD}.original_module.weight"].startswith("irrelevant: the layer before")
    add(trained, f"{HEAD}.modules_to_save.weight", 35, 16)
    assert f"{HEAD}.modules_to_save.weight: differs from {HEAD}.weight" in reasons(trained)


def test_an_original_module_shared_with_a_tied_head_is_refused_unless_the_head_is_saved(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), modules_to_save=["embed_tokens"])
    add(trained, f"{EMBEDDING}.original_module.weight", 32, 16)
    assert "changes lm_head.weight too. Save that layer as well" in reasons(trained)


def test_tied_saved_modules_must_both_be_there(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    drop(trained, f"{HEAD}.weight")
    assert "lm_head.weight: missing, expected because modules_to_save names its module" in reasons(trained)


def test_an_adapter_on_top_of_a_saved_module_is_refused(train: Any, llama: Any) -> None:
    trained = train(llama, modules_to_save=["lm_head"])
    add(trained, f"{HEAD}.base_layer.weight", 32, 16)
    assert "this module is in modules_to_save, expected no adapter on top of it" in reasons(trained)


@pytest.mark.parametrize("rows", [31, 33])
def test_a_resized_embedding_without_its_head_is_refused(train: Any, llama: Any, rows: int) -> None:
    trained = train(llama, vocab_size=rows)
    drop(trained, f"{HEAD}.weight")
    text = reasons(trained)
    assert f"vocabulary: model.embed_tokens.weight has {rows} rows, the base has 32" in text
    assert "save_embedding_layers=True" in text


def test_embedding_and_head_of_different_sizes_are_refused(train: Any, llama: Any) -> None:
    trained = train(llama, vocab_size=33)
    add(trained, f"{HEAD}.weight", 34, 16)
    assert "expected embedding and head, both whole and of one size" in reasons(trained)


def test_a_table_of_another_width_is_refused_by_its_shape(train: Any, llama: Any) -> None:
    trained = train(llama, vocab_size=33)
    add(trained, f"{HEAD}.weight", 33, 17)
    assert "has shape [33, 17], expected [32, 16]" in reasons(trained)


def test_a_resized_vocabulary_is_reported(train: Any, llama: Any) -> None:
    audit = train(llama, vocab_size=40).audit()
    assert (audit.verdict, audit.vocab_size) == ("exact-by-merge", 40)


ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def token_row_reasons(trained: Any) -> str:
    audit = trained.audit()
    assert audit.verdict == "refused"
    assert all(reason.startswith("adapter 'zoo': ") for reason in audit.reasons)
    return "\n".join(audit.reasons)


@pytest.fixture
def tokens(train: Any, llama: Any) -> Any:
    return train(llama, trainable_token_indices=[3, 30])


def test_rows_are_listed_in_the_order_of_the_indices(tokens: Any) -> None:
    (change,) = [c for c in tokens.audit().changes if c.rows_key]
    assert (change.parameter, change.rows, change.rows_key) == ("model.embed_tokens.weight", (3, 30), ROWS)


def test_an_index_beyond_the_vocabulary_is_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices=[3, 32])
    assert (
        "trainable_token_indices=[32]: expected indices below 32, the rows of model.embed_tokens"
        in token_row_reasons(tokens)
    )


def test_more_indices_than_rows_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices=[3, 30, 4])
    assert f"{ROWS}: has shape [2, 16], expected [3, 16] by trainable_token_indices" in token_row_reasons(tokens)


def test_missing_rows_are_refused(tokens: Any) -> None:
    tensors = tokens.tensors()
    del tensors[ROWS]
    tokens.write(tensors)
    assert "trainable_tokens_delta: missing, expected because of trainable_token_indices" in token_row_reasons(tokens)


def test_rows_that_the_configuration_does_not_name_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices=None)
    assert f"{ROWS}: nothing in the configuration uses this tensor" in token_row_reasons(tokens)


def test_rows_of_a_layer_that_is_no_table_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices={"q_proj": [3, 30]})
    assert "trainable_token_indices='q_proj': expected one of model.embed_tokens, lm_head" in token_row_reasons(tokens)


def test_rows_beside_a_pair_on_the_same_layer_are_refused(train: Any, llama: Any) -> None:
    trained = train(llama, target_modules=["embed_tokens", "q_proj"])
    trained.configure(trainable_token_indices=[3])
    trained.write(trained.tensors() | {ROWS: np.ones((1, 16), np.float32)})
    assert "expected no LoRA pair on model.embed_tokens beside it" in token_row_reasons(trained)


def test_nan_in_a_row_is_refused(tokens: Any) -> None:
    tokens.write(tokens.tensors() | {ROWS: np.full((2, 16), np.nan, np.float32)})
    assert f"{ROWS}: holds NaN or infinity" in token_row_reasons(tokens)


def test_tied_layers_with_different_tokens_are_refused_when_tying_is_ensured(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), trainable_token_indices={"embed_tokens": [1], "lm_head": [2]})
    trained.configure(ensure_weight_tying=True)
    assert "expected the same tokens for tied layers" in token_row_reasons(trained)


def test_the_redundant_copy_of_a_tied_head_must_be_equal(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), vocab_size=34, trainable_token_indices=[33])
    key = "base_model.model.lm_head.token_adapter.trainable_tokens_delta"
    assert trained.audit().tensor_uses[key] == "used"
    trained.write(trained.tensors() | {key: np.ones((1, 16), np.float32)})
    assert f"{key}: differs from {ROWS}" in token_row_reasons(trained)
