"""Keys outside the computation: each is irrelevant by name or refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from peft import LoraConfig, PeftType

from lorabatch.engine.adapter.config import AdapterConfig
from lorabatch.engine.adapter.ledger import Ledger
from lorabatch.engine.adapter.rules import IRRELEVANT, REFUSED_WHEN_SET, judge_keys


def judge(**raw: Any) -> Ledger:
    ledger = Ledger("zoo")
    judge_keys({"peft_type": "LORA"} | raw, ledger)
    return ledger


def test_every_key_of_peft_has_a_rule() -> None:
    judged = {"peft_type", "task_type", "init_lora_weights"}
    read = {f.name for f in fields(AdapterConfig)}
    assert {f.name for f in fields(LoraConfig)} - read - judged == set(IRRELEVANT) | set(REFUSED_WHEN_SET) - {
        "enable_lora"
    }


def test_a_fresh_peft_configuration_is_accepted_whole() -> None:
    raw = LoraConfig(task_type="CAUSAL_LM").to_dict()
    ledger = judge(**{key: value for key, value in raw.items() if key != "peft_type"})
    assert not ledger.is_refused
    assert ledger.key_uses.keys() == raw.keys() - {f.name for f in fields(AdapterConfig)}


@pytest.mark.parametrize("key", sorted(REFUSED_WHEN_SET))
def test_an_exotic_variant_is_refused_by_name_and_says_what_to_do(key: str) -> None:
    ledger = judge(**{key: [1, 2]})
    (reason,) = ledger.reasons()
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
    (reason,) = judge(peft_type=peft_type).reasons()
    assert reason.startswith(f"adapter 'zoo': peft_type={peft_type!r}: expected 'LORA'")


def test_a_missing_method_is_refused() -> None:
    ledger = Ledger("zoo")
    judge_keys({}, ledger)
    assert ledger.is_refused


@pytest.mark.parametrize("task", ["SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"])
def test_an_adapter_for_another_task_is_refused(task: str) -> None:
    (reason,) = judge(task_type=task).reasons()
    assert f"task_type={task!r}: expected 'CAUSAL_LM'" in reason


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_an_adapter_for_generation_is_accepted(task: Any) -> None:
    assert not judge(task_type=task).is_refused


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_alone_is_irrelevant(start: Any) -> None:
    assert judge(init_lora_weights=start).key_uses["init_lora_weights"].startswith("irrelevant: ")


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"])
def test_a_start_that_changed_the_base_is_refused_until_converted(start: str) -> None:
    (reason,) = judge(init_lora_weights=start).reasons()
    assert f"init_lora_weights={start!r}" in reason
    assert "path_initial_model_for_weight_conversion" in reason


@pytest.mark.parametrize("start", ["magic", 1, ["eva"]])
def test_an_unknown_start_is_refused(start: Any) -> None:
    assert "expected true, false or one of 'gaussian'" in judge(init_lora_weights=start).reasons()[0]


def test_an_unknown_key_that_is_set_is_refused_by_name() -> None:
    (reason,) = judge(lora_warp_factor=9).reasons()
    assert reason.startswith("adapter 'zoo': lora_warp_factor=9: this key is not known")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_that_is_empty_is_told_and_accepted(value: Any) -> None:
    ledger = judge(lora_warp_factor=value)
    assert not ledger.is_refused
    assert ledger.key_uses["lora_warp_factor"] == "irrelevant: not known here, but not set"
