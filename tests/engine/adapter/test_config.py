"""Reading the keys that take part: PEFT's defaults, its pattern rule, and strict types."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.adapter.config import AdapterConfig, read_adapter_config
from lorabatch.engine.adapter.ledger import Ledger

MODULES = [
    f"model.layers.{layer}.{site}"
    for layer in (0, 1, 10, 11)
    for site in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
] + ["lm_head", "model.embed_tokens"]
PATTERNS = [
    "q_proj",
    "_proj",
    "self_attn.k_proj",
    r"layers\.1\..*",
    "layers.1.*q_proj",
    "^model.layers.0.*",
    "model.layers.10.mlp.up_proj",
    "(gate|up)_proj",
    ".*head",
    "embed_tokens$",
]


def read(**raw: Any) -> tuple[AdapterConfig, Ledger]:
    ledger = Ledger("zoo")
    return read_adapter_config(raw, ledger), ledger


@given(
    r=st.integers(1, 64),
    alpha=st.floats(0.01, 512),
    ranks=st.lists(st.tuples(st.sampled_from(PATTERNS), st.integers(1, 64)), max_size=4).map(dict),
    alphas=st.lists(st.tuples(st.sampled_from(PATTERNS), st.floats(0.01, 512)), max_size=4).map(dict),
    use_rslora=st.booleans(),
    module=st.sampled_from(MODULES),
)
def test_rank_and_scaling_follow_peft(
    r: int, alpha: float, ranks: dict[str, int], alphas: dict[str, float], use_rslora: bool, module: str
) -> None:
    from peft.utils.other import get_pattern_key

    config, ledger = read(r=r, lora_alpha=alpha, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=use_rslora)
    rank = ranks.get(get_pattern_key(ranks.keys(), module), r)
    expected = alphas.get(get_pattern_key(alphas.keys(), module), alpha)
    assert not ledger.is_refused
    assert config.rank_of(module) == rank
    assert config.scaling_of(module) == expected / (math.sqrt(rank) if use_rslora else rank)


def test_absent_keys_have_the_defaults_of_peft() -> None:
    from peft import LoraConfig

    expected = LoraConfig()
    config, _ = read()
    assert (config.r, config.lora_alpha, config.bias) == (expected.r, expected.lora_alpha, expected.bias)
    assert config.use_rslora is expected.use_rslora
    assert config.use_dora is expected.use_dora
    assert config.scaling_of("x.q_proj") == 1.0


def test_every_key_read_is_one_of_peft() -> None:
    from dataclasses import fields

    from peft import LoraConfig

    assert {f.name for f in fields(AdapterConfig)} <= {f.name for f in fields(LoraConfig)}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("r", 0, "a whole number of at least 1"),
        ("r", True, "a whole number of at least 1"),
        ("r", "8", "a whole number of at least 1"),
        ("r", 8.0, "a whole number of at least 1"),
        ("lora_alpha", None, "a finite number"),
        ("lora_alpha", "16", "a finite number"),
        ("lora_alpha", 1e999, "a finite number"),
        ("use_rslora", 1, "true or false"),
        ("use_dora", "false", "true or false"),
        ("bias", "some", "'none', 'all' or 'lora_only'"),
        ("bias", None, "'none', 'all' or 'lora_only'"),
        ("rank_pattern", ["q_proj"], "an object of name patterns and values"),
        ("rank_pattern", {"q_proj": 0}, "a whole number of at least 1"),
        ("rank_pattern", {"q_(proj": 4}, "a valid regular expression"),
        ("alpha_pattern", {"q_proj": "8"}, "a finite number"),
        ("target_modules", "q_(proj", "a valid regular expression"),
        ("target_modules", [1], "a list of module names"),
        ("target_modules", [""], "a list of module names"),
        ("modules_to_save", "lm_head", "a list of module names"),
        ("modules_to_save", ["lm_(head"], "a valid regular expression"),
        ("layers_to_transform", [-1], "a list of whole numbers of at least 0"),
        ("layers_to_transform", "1", "a list of whole numbers of at least 0"),
        ("layers_pattern", 3, "a list of module names"),
        ("trainable_token_indices", [1, 1], "each token index once"),
        ("trainable_token_indices", [-1], "a list of whole numbers of at least 0"),
        ("trainable_token_indices", {"embed_tokens": "1"}, "a list of whole numbers of at least 0"),
    ],
)
def test_a_malformed_value_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    _, ledger = read(**{key: value})
    assert ledger.is_refused
    assert ledger.key_uses[key].startswith("refused: expected ")
    (reason,) = [reason for reason in ledger.reasons() if expected in reason]
    assert reason.startswith(f"adapter 'zoo': {key}={value!r}: expected ")
    assert "save the adapter again" in reason


def test_all_problems_are_told_at_once() -> None:
    _, ledger = read(r=0, lora_alpha="x", bias="some")
    assert len(ledger.reasons()) == 3


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"target_modules": ".*q_proj", "layers_pattern": "layers", "layers_to_transform": 0},
        {"target_modules": ["q_proj"], "layers_pattern": "layers"},
        {"use_dora": True, "lora_bias": True},
    ],
)
def test_combinations_that_peft_refuses_are_refused(keys: dict[str, Any]) -> None:
    from peft import LoraConfig

    with pytest.raises(ValueError, match=r"layers_|lora_bias"):
        LoraConfig(**keys)
    assert read(**keys)[1].is_refused


def test_an_absent_or_null_list_is_empty() -> None:
    names = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_pattern", "trainable_token_indices")
    config, ledger = read(**dict.fromkeys(names))
    assert not ledger.is_refused
    assert config == SimpleNamespace(config=AdapterConfig()).config
