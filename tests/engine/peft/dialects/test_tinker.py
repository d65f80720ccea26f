"""Adapters that Tinker saves: equal to PEFT's over the same weights, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from other_forms import CONFIG, WEIGHTS, as_tinker
from peft_oracle import last_logits
from safetensors.numpy import load_file, save_file

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("targets", [[*ALL, "lm_head"], ALL])
def test_an_adapter_of_tinker_has_the_content_and_the_logits_of_pefts(
    served_base: Any, train: Any, tmp_path: Path, targets: list[str]
) -> None:
    base = served_base("qwen3", False)
    trained = train(base, target_modules=targets)
    trained.write({key: value for key, value in trained.tensors().items() if ".base_layer." not in key})
    folder = as_tinker(trained.folder, tmp_path / "tinker")
    audit = audit_adapter(folder, base.config, "tinker")
    assert audit.verdict == ("exact" if targets == ALL else "exact-by-merge"), audit.reasons
    assert audit.content_sha256 == trained.audit().content_sha256
    engine = Engine(base.folder, EngineConfig(mode="auto", pool_bytes=4 << 20))
    engine.register_adapter(audit.content_sha256, folder, "tinker")
    prompt = (5, 9, 21, 40, 3)
    with torch.no_grad():
        logits = trained.model(torch.tensor([prompt])).logits[0, -1]
    found = last_logits(engine, prompt, audit.content_sha256)
    torch.testing.assert_close(found[: len(logits)], logits, atol=1e-4, rtol=1e-4)


def test_a_head_of_a_tied_base_is_refused(served_base: Any, train: Any, tmp_path: Path) -> None:
    base = served_base("llama", True)
    folder = as_tinker(train(base, target_modules=[*ALL, "lm_head"]).folder, tmp_path / "tinker")
    reasons = audit_adapter(folder, base.config, "tinker").reasons
    assert any("on the head of a tied base" in reason for reason in reasons), reasons


def test_what_was_not_saved_whole_or_has_two_heads_is_refused(llama: Any, train: Any, tmp_path: Path) -> None:
    folder = as_tinker(train(llama, target_modules=[*ALL, "lm_head"]).folder, tmp_path / "tinker")
    tensors = load_file(folder / WEIGHTS)
    for change, what in (
        ({key: value for key, value in tensors.items() if "layers.1.mlp.up_proj" not in key}, "has no tensors for it"),
        ({key: value for key, value in tensors.items() if "unembed_tokens.lora_B" not in key}, "its partner lora_b"),
        (
            tensors | {key.replace("model.unembed_tokens", "lm_head"): value for key, value in tensors.items()},
            "plays the same part as",
        ),
    ):
        save_file(change, folder / WEIGHTS)
        reasons = " ".join(audit_adapter(folder, llama.config, "tinker").reasons)
        assert what in reasons, reasons


@pytest.mark.parametrize("has_head", [True, False])
def test_split_projections_of_hybrid_models_are_refused_with_the_reason(
    llama: Any, train: Any, tmp_path: Path, has_head: bool
) -> None:
    """A base without linear attention has none of them, one with it has them as one."""
    folder = as_tinker(train(llama, target_modules=[*ALL, "lm_head"]).folder, tmp_path / "tinker")
    tensors = load_file(folder / WEIGHTS)
    renamed = {
        key.replace("self_attn.q_proj", "linear_attn.in_proj_q"): value
        for key, value in tensors.items()
        if has_head or "unembed_tokens" not in key
    }
    save_file(renamed, folder / WEIGHTS)
    reasons = " ".join(audit_adapter(folder, llama.config, "tinker").reasons)
    assert "'model.layers.0.linear_attn.in_proj_q': it is of linear attention, which this base does" in reasons
    assert json.loads((folder / CONFIG).read_text())["target_modules"] == "all-linear"
