"""trainable_token_indices: every row has its place, or the adapter is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def reasons(trained: Any) -> str:
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
    assert "trainable_token_indices=[32]: expected indices below 32, the rows of model.embed_tokens" in reasons(tokens)


def test_more_indices_than_rows_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices=[3, 30, 4])
    assert f"{ROWS}: has shape [2, 16], expected [3, 16] by trainable_token_indices" in reasons(tokens)


def test_missing_rows_are_refused(tokens: Any) -> None:
    tensors = tokens.tensors()
    del tensors[ROWS]
    tokens.write(tensors)
    assert "trainable_tokens_delta: missing, expected because of trainable_token_indices" in reasons(tokens)


def test_rows_nobody_asked_for_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices=None)
    assert f"{ROWS}: nothing in the configuration uses this tensor" in reasons(tokens)


def test_rows_of_a_layer_that_is_no_table_are_refused(tokens: Any) -> None:
    tokens.configure(trainable_token_indices={"q_proj": [3, 30]})
    assert "trainable_token_indices='q_proj': expected one of model.embed_tokens, lm_head" in reasons(tokens)


def test_rows_beside_a_pair_on_the_same_layer_are_refused(train: Any, llama: Any) -> None:
    trained = train(llama, target_modules=["embed_tokens", "q_proj"])
    trained.configure(trainable_token_indices=[3])
    trained.write(trained.tensors() | {ROWS: np.ones((1, 16), np.float32)})
    assert "expected no LoRA pair on model.embed_tokens beside it" in reasons(trained)


def test_nan_in_a_row_is_refused(tokens: Any) -> None:
    tokens.write(tokens.tensors() | {ROWS: np.full((2, 16), np.nan, np.float32)})
    assert f"{ROWS}: holds NaN or infinity" in reasons(tokens)


def test_tied_layers_with_different_tokens_are_refused_when_tying_is_ensured(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), trainable_token_indices={"embed_tokens": [1], "lm_head": [2]})
    trained.configure(ensure_weight_tying=True)
    assert "expected the same tokens for tied layers" in reasons(trained)


def test_the_redundant_copy_of_a_tied_head_must_be_equal(bases: Any, train: Any) -> None:
    trained = train(bases("llama", True), vocab_size=34, trainable_token_indices=[33])
    key = "base_model.model.lm_head.token_adapter.trainable_tokens_delta"
    assert trained.audit().tensor_uses[key] == "used"
    trained.write(trained.tensors() | {key: np.ones((1, 16), np.float32)})
    assert f"{key}: differs from {ROWS}" in reasons(trained)
