"""Adapters of mlx-lm: equal to PEFT's over the same weights, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from other_forms import CONFIG, MLX_CONFIG, mlx_tensors, write_mlx
from peft_oracle import last_logits
from safetensors.numpy import save_file

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.tensor_file import TensorEntry

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all linear layers": ({"target_modules": "all-linear"}, {}),
    "the last layer": ({"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}, {"num_layers": 1}),
    "named keys": (
        {"target_modules": ["o_proj", "up_proj"]},
        {"num_layers": -1, "lora_parameters": {"keys": ["self_attn.o_proj", "mlp.up_proj"]}},
    ),
    "dora": ({"target_modules": "all-linear", "use_dora": True}, {"fine_tune_type": "dora"}),
    "dora of 0.16": (
        {"target_modules": ["v_proj"], "use_dora": True},
        {"fine_tune_type": ..., "use_dora": True, "num_layers": ..., "lora_layers": 2},
    ),
    "head": (
        {"target_modules": ["q_proj", "lm_head"]},
        {"lora_parameters": {"keys": ["self_attn.q_proj", "lm_head"]}},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_mlx_lm_has_the_content_and_the_logits_of_pefts(
    served_base: Any, train: Any, tmp_path: Path, kind: str
) -> None:
    base = served_base("qwen3", False)
    settings, changes = KINDS[kind]
    trained = pairs_only(train(base, **settings))
    folder = write_mlx(tmp_path / "mlx", mlx_tensors(trained.folder), rank=2, scale=2.5, **changes)
    audit, expected = audit_adapter(folder, base.config, "mlx"), trained.audit()
    assert audit.verdict == expected.verdict != "refused"
    assert audit.content_sha256 == expected.content_sha256
    assert set(audit.key_uses) == set(json.loads((folder / CONFIG).read_text()))
    check_logits(base, folder, trained)


def pairs_only(trained: Any) -> Any:
    """The adapter without the layers that PEFT saves whole, unchanged, below an adapted embedding or head."""
    trained.write({key: value for key, value in trained.tensors().items() if ".base_layer." not in key})
    return trained


def check_logits(base: Any, folder: Path, trained: Any) -> None:
    engine = Engine(base.folder, EngineConfig(mode="auto", pool_bytes=4 << 20))
    adapter_id = audit_adapter(folder, base.config, "mlx").content_sha256
    engine.register_adapter(adapter_id, folder, "mlx")
    prompt = (5, 9, 21, 40, 3)
    with torch.no_grad():
        expected = trained.model(torch.tensor([prompt])).logits[0, -1]
        plain = base.model(torch.tensor([prompt])).logits[0, -1]
    found = last_logits(engine, prompt, adapter_id)
    torch.testing.assert_close(found[: len(expected)], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[: len(plain)], plain, atol=1e-3)


def test_a_pair_on_a_tied_embedding_changes_the_head_too(served_base: Any, train: Any, tmp_path: Path) -> None:
    base = served_base("llama", True)
    trained = pairs_only(train(base, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True))
    tensors = {key: value for key, value in mlx_tensors(trained.folder).items() if not key.startswith("lm_head")}
    keys = {"keys": ["self_attn.q_proj", "model.embed_tokens"]}
    folder = write_mlx(tmp_path / "mlx", tensors, rank=2, scale=2.5, lora_parameters=keys)
    audit = audit_adapter(folder, base.config, "mlx")
    assert (audit.verdict, audit.content_sha256) == ("exact-by-merge", trained.audit().content_sha256), audit.reasons
    check_logits(base, folder, trained)


def test_keys_that_no_layer_has_are_named(served_base: Any, train: Any, tmp_path: Path) -> None:
    base = served_base("qwen3", False)
    trained = train(base, target_modules=["q_proj"])
    keys = {"keys": ["self_attn.q_proj", "attn.Wqkv"]}
    folder = write_mlx(tmp_path / "mlx", mlx_tensors(trained.folder), rank=2, scale=2.5, lora_parameters=keys)
    audit = audit_adapter(folder, base.config, "mlx")
    assert audit.verdict == "exact"
    assert any("attn.Wqkv" in note for note in audit.notes)


def test_a_key_of_the_head_is_passed_over_where_the_head_is_the_embedding(
    served_base: Any, train: Any, tmp_path: Path
) -> None:
    base = served_base("llama", True)
    trained = train(base, target_modules=["v_proj"])
    keys = {"keys": ["self_attn.v_proj", "lm_head"]}
    folder = write_mlx(tmp_path / "mlx", mlx_tensors(trained.folder), rank=2, scale=2.5, lora_parameters=keys)
    audit = audit_adapter(folder, base.config, "mlx")
    assert (audit.verdict, audit.content_sha256) == ("exact", trained.audit().content_sha256)
    assert any("key lm_head names no module" in note for note in audit.notes)
    untied = served_base("qwen3", False)
    trained = train(untied, target_modules=["v_proj"])
    folder = write_mlx(tmp_path / "untied", mlx_tensors(trained.folder), rank=2, scale=2.5, lora_parameters=keys)
    assert "lm_head: the configuration targets it" in audit_adapter(folder, untied.config, "mlx").reasons[0]


def without(part: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        del tensors[next(key for key in tensors if part in key)]

    return change


def with_tensor(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = np.ones(shape, np.float32)

    return change


@pytest.mark.parametrize(
    ("changes", "damage", "what"),
    [
        ({"fine_tune_type": "full"}, None, "the file holds whole weights"),
        ({"fine_tune_type": "ia3"}, None, "fine_tune_type='ia3': expected 'lora' or 'dora'"),
        ({"use_dora": "yes"}, None, "use_dora='yes': expected true or false"),
        ({"use_dora": True}, None, "unclear which one is meant"),
        ({"fine_tune_type": "dora"}, None, "lora_magnitude_vector: missing"),
        ({"lora_parameters": {"rank": 0}}, None, "expected rank and scale, each a whole number of at least 1"),
        ({"lora_parameters": {"rank": 3}}, None, "has rank 2, expected 3"),
        ({"lora_parameters": {"scale": "2"}}, None, "each a finite number"),
        ({"lora_parameters": {"keys": "q_proj"}}, None, "expected keys to be null or a list"),
        ({"lora_parameters": {"use_rslora": True}}, None, "'use_rslora' is not known"),
        ({"num_layers": ..., "lora_layers": 2, "lora_parameters": {"alpha": 16}}, None, "alpha differs from rank"),
        ({"num_layers": "all"}, None, "num_layers='all': expected the number of adapted layers"),
        ({"num_layers": ...}, None, "num_layers=None: expected the number of adapted layers"),
        ({"num_layers": 1}, None, "not among the modules the configuration targets"),
        ({}, without("layers.0.self_attn.q_proj.lora_b"), "its partner lora_b is missing"),
        ({}, with_tensor("model.layers.0.mlp.experts.lora_a", (4, 2, 16)), "no linear layer"),
        ({}, with_tensor("model.layers.0.self_attn.q_proj.m", (16,)), "use_dora is not true"),
        ({}, with_tensor("model.layers.0.self_attn.q_proj.scales", (16,)), "scales: expected lora_a, lora_b or m"),
        ({}, with_tensor("model.layers.0.self_attn.q_proj.lora_A.weight", (2, 16)), "weight: expected lora_a, lora_b"),
    ],
)
def test_what_mlx_lm_would_not_load_or_peft_cannot_say_is_refused(
    llama: Any, train: Any, tmp_path: Path, changes: dict[str, Any], damage: Any, what: str
) -> None:
    trained = train(llama, target_modules=["q_proj"])
    tensors = mlx_tensors(trained.folder)
    if damage:
        damage(tensors)
    folder = write_mlx(tmp_path / "mlx", tensors, rank=2, scale=2.5, **changes)
    audit = audit_adapter(folder, llama.config, "mlx")
    assert audit.verdict == "refused"
    assert re.search(what.replace("(", r"\("), " ".join(audit.reasons)), audit.reasons


def test_dora_on_an_embedding_is_refused_by_name(llama: Any, train: Any, tmp_path: Path) -> None:
    trained = train(llama, target_modules=["embed_tokens", "q_proj"])
    folder = write_mlx(tmp_path / "mlx", mlx_tensors(trained.folder), rank=2, scale=2.5, fine_tune_type="dora")
    reasons = audit_adapter(folder, llama.config, "mlx").reasons
    assert any("DoRA of mlx-lm on an embedding" in reason for reason in reasons), reasons


def test_files_beside_the_weights_are_named(llama: Any, train: Any, tmp_path: Path) -> None:
    trained = train(llama, target_modules=["q_proj"])
    folder = write_mlx(tmp_path / "mlx", mlx_tensors(trained.folder), rank=2, scale=2.5)
    for step in (100, 200):
        save_file({"x": np.ones(1, np.float32)}, folder / f"{step:07d}_adapters.safetensors")
    audit = audit_adapter(folder, llama.config, "mlx")
    assert audit.verdict == "exact"
    assert any("0000100_adapters.safetensors to 0000200_adapters.safetensors" in note for note in audit.notes)
    (folder / "adapter_model.safetensors").write_bytes((trained.folder / "adapter_model.safetensors").read_bytes())
    assert "two sets of weights" in audit_adapter(folder, llama.config, "mlx").reasons[0]


def test_weights_of_early_versions_are_refused_by_name(llama: Any, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(MLX_CONFIG))
    np.savez(tmp_path / "adapters.npz", x=np.ones(1))
    assert "adapters.npz: weights of an early mlx-lm" in audit_adapter(tmp_path, llama.config, "mlx").reasons[0]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.sampled_from(("F32", "F16")))
def test_arranged_bytes_are_those_of_the_turned_matrix(
    heads: int, half: int, width: int, first: int, dtype: str
) -> None:
    kind = np.dtype("<u4" if dtype == "F32" else "<u2")
    rows = heads * 2 * half
    stored = np.arange(rows * width, dtype=kind)
    entry = TensorEntry("x", dtype, (width, rows), "f", 0, stored.nbytes, is_transposed=True)
    found = entry.arranged(stored.view(np.uint8)).view(kind).reshape(width, rows)
    assert (found == stored.reshape(rows, width).T).all()
    stored = np.arange((first + rows) * width, dtype=kind)
    shape = (first + rows, width)
    entry = TensorEntry("x", dtype, shape, "f", 0, stored.nbytes, row_order=(first, heads, half, 2))
    found = entry.arranged(stored.view(np.uint8)).view(kind)
    assert (found[: first * width] == stored[: first * width]).all()
    moved = stored[first * width :].reshape(heads, half, 2, width).swapaxes(1, 2)
    assert (found[first * width :].reshape(moved.shape) == moved).all()
