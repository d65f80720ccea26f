"""Rows of adapters with tokenizers of their own, in an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft_oracle
import pytest

from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams


@pytest.fixture
def folders(make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter."""
    base = make_model(tmp_path / "base")
    return base, make_adapter(tmp_path / "adapter", base, r=2, target_modules=["q_proj"])


def test_a_tokenizer_replaced_since_the_audit_costs_its_adapter_s_rows_alone(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    shutil.copy(base / "tokenizer.json", adapter)
    engine = peft_oracle.make_engine(base)
    (adapter_id,) = peft_oracle.register_all(engine, {"own": adapter}).values()
    (adapter / "tokenizer.json").write_text((adapter / "tokenizer.json").read_text() + " ")
    rows = [Request(name, (5, 6), i, SamplingParams(max_tokens=2)) for name, i in (("own", adapter_id), ("base", None))]
    found = peft_oracle.serve(engine, rows)
    assert found["base"].error is None
    assert "its tokenizer holds content" in (found["own"].error or "")


def test_grammars_know_a_vocabulary_in_an_older_form_and_its_added_tokens(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    raw = json.loads((base / "tokenizer.json").read_text())["model"]
    (adapter / "vocab.json").write_text(json.dumps(raw["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["merges"]]
    (adapter / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    ends = dict.fromkeys(("bos_token", "unk_token"), "<|endoftext|>") | {"eos_token": "<|im_end|>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "additional_special_tokens": ["<|im_start|>"], **ends}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = peft_oracle.make_engine(base)
    adapter_id = audit_adapter(adapter, engine.model, "own").identity_sha256
    assert adapter_id is not None
    engine.register_adapter(adapter_id, adapter, "own")
    sampling = SamplingParams(max_tokens=8, regex="(fox|dog) 7")
    (found,) = peft_oracle.serve(engine, [Request("own", (5, 6), adapter_id, sampling)]).values()
    assert found.error is None
    assert found.text in ("fox 7", "dog 7")
