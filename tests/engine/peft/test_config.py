"""Reading the keys that take part: PEFT's defaults, its pattern rule, and strict types.

Keys outside the computation: each is irrelevant by name or refused by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lorabatch.engine.peft.config import (
    CONVERTIBLE,
    IRRELEVANT,
    REFUSED_WHEN_SET,
    AdapterConfig,
    judge_keys,
    read_adapter_config,
)
from lorabatch.engine.peft.findings import Ledger

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
    ledger = Ledger()
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
    assert config.ranks([module]) == {module: rank}
    assert config.scalings([module])[module] == expected / (math.sqrt(rank) if use_rslora else rank)


def test_absent_keys_have_the_defaults_of_peft() -> None:
    from peft import LoraConfig

    expected = LoraConfig()
    config, _ = read()
    assert (config.r, config.lora_alpha, config.bias) == (expected.r, expected.lora_alpha, expected.bias)
    assert config.use_rslora is expected.use_rslora
    assert config.use_dora is expected.use_dora
    assert config.scalings(["x.q_proj"]) == {"x.q_proj": 1.0}


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
    (reason,) = [reason for reason in ledger.reasons("zoo") if expected in reason]
    assert reason.startswith(f"adapter 'zoo': {key}={value!r}: expected ")
    assert "save the adapter again" in reason


def test_all_problems_are_reported_at_once() -> None:
    _, ledger = read(r=0, lora_alpha="x", bias="some")
    assert len(ledger.reasons("zoo")) == 3


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


def judge(**raw: Any) -> Ledger:
    ledger = Ledger()
    judge_keys({"peft_type": "LORA"} | raw, ledger)
    return ledger


@pytest.mark.reference("peft")
def test_every_key_of_peft_has_a_rule(unclassified: Callable[[Iterable[str]], None]) -> None:
    judged = {"peft_type", "task_type", "init_lora_weights"}
    read = {f.name for f in fields(AdapterConfig)}
    found = {f.name for f in fields(LoraConfig)}
    ours = (set(IRRELEVANT) | set(REFUSED_WHEN_SET)) - {"enable_lora"}
    unclassified(found - read - judged - ours)
    assert ours <= found


def test_a_fresh_peft_configuration_is_accepted_whole() -> None:
    raw = LoraConfig(task_type="CAUSAL_LM").to_dict()
    ledger = judge(**{key: value for key, value in raw.items() if key != "peft_type"})
    assert not ledger.is_refused
    assert ledger.key_uses.keys() == raw.keys() - {f.name for f in fields(AdapterConfig)}


@pytest.mark.parametrize("key", sorted(REFUSED_WHEN_SET))
def test_an_exotic_variant_is_refused_by_name_and_says_what_to_do(key: str) -> None:
    ledger = judge(**{key: [1, 2]})
    (reason,) = ledger.reasons("zoo")
    assert reason.startswith(f"adapter 'zoo': {key}=[1, 2]: ")
    assert "expected" in reason
    assert ledger.key_uses[key].startswith("refused: ")


@pytest.mark.parametrize("key", sorted(REFUSED_WHEN_SET))
@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_a_variant_that_is_not_set_is_irrelevant(key: str, value: Any) -> None:
    ledger = judge(**{key: value})
    assert not ledger.is_refused
    assert ledger.key_uses[key] == "irrelevant: not set"


@pytest.mark.parametrize("peft_type", [kind.value for kind in PeftType if kind != PeftType.LORA] + [None, "lora"])
def test_every_other_method_is_refused_by_name(peft_type: Any) -> None:
    (reason,) = judge(peft_type=peft_type).reasons("zoo")
    assert reason.startswith(f"adapter 'zoo': peft_type={peft_type!r}: expected 'LORA'")


METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "C3A": {"block_size": 4},
    "VBLORA": {"vector_length": 4, "num_vectors": 8},
    "FOURIERFT": {"n_frequency": 4},
    "WAVEFT": {"n_frequency": 4},
    "GRALORA": {"r": 4},
    "RANDLORA": {"r": 4},
    "MISS": {"r": 4},
    "ADALORA": {"total_step": 10},
    "OFT": {"oft_block_size": 4},
}


@pytest.mark.parametrize("peft_type", [*CONVERTIBLE, "ADALORA", "HIRA", "IA3", "OFT", "BOFT", "HRA", "LN_TUNING"])
def test_messages_name_peft_own_conversion_where_it_has_one(peft_type: str, llama: Any) -> None:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(peft_type)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            llama.fresh(),
            config(target_modules=["q_proj"], task_type="CAUSAL_LM", **METHOD_SETTINGS.get(peft_type, {})),
        )
    (reason,) = judge(peft_type=peft_type).reasons("zoo")
    assert ("save_as_lora" in reason) == model.supports_lora_conversion()


def test_a_missing_method_is_refused() -> None:
    ledger = Ledger()
    judge_keys({}, ledger)
    assert ledger.is_refused


@pytest.mark.parametrize("task", ["TOKEN_CLS", "QUESTION_ANS", ["SEQ_CLS"]])
def test_an_adapter_for_another_task_is_refused(task: str) -> None:
    (reason,) = judge(task_type=task).reasons("zoo")
    assert f"task_type={task!r}: expected 'CAUSAL_LM'" in reason


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_2_SEQ_LM", None, "SEQ_CLS", "FEATURE_EXTRACTION"])
def test_an_adapter_for_a_task_that_is_computed_is_accepted(task: Any) -> None:
    assert not judge(task_type=task).is_refused


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_alone_is_irrelevant(start: Any) -> None:
    assert judge(init_lora_weights=start).key_uses["init_lora_weights"].startswith("irrelevant: ")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"])
def test_a_start_that_changed_the_base_is_refused_until_converted(start: str) -> None:
    (reason,) = judge(init_lora_weights=start).reasons("zoo")
    assert f"init_lora_weights={start!r}" in reason
    assert "path_initial_model_for_weight_conversion" in reason


@pytest.mark.parametrize("start", ["magic", 1, ["eva"]])
def test_an_unknown_start_is_refused(start: Any) -> None:
    assert "expected true, false or one of 'gaussian'" in judge(init_lora_weights=start).reasons("zoo")[0]


def test_an_unknown_key_that_is_set_is_refused_by_name() -> None:
    (reason,) = judge(lora_warp_factor=9).reasons("zoo")
    assert reason.startswith("adapter 'zoo': lora_warp_factor=9: this key is not known")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_is_empty_is_reported_and_accepted(value: Any) -> None:
    ledger = judge(lora_warp_factor=value)
    assert not ledger.is_refused
    assert ledger.key_uses["lora_warp_factor"] == "irrelevant: not known here, but not set"
