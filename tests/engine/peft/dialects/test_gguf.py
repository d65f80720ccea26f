"""Adapters in GGUF: equal to the PEFT adapters that llama.cpp's converter made them from, or refused by name."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from other_forms import CONFIG, as_gguf, gguf_tensors, write_gguf
from peft_oracle import last_logits

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.jobs.storage.adapter_copy import adapter_folder

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}


def heads_of(base: Any) -> tuple[int, int] | None:
    return (base.config.num_heads, base.config.num_kv_heads) if base.config.family == "llama" else None


def pairs_only(trained: Any) -> Any:
    """The adapter without the layers that PEFT saves whole, unchanged, below an adapted embedding or head."""
    trained.write({key: value for key, value in trained.tensors().items() if ".base_layer." not in key})
    return trained


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 3}}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("qwen3", {"target_modules": ["q_proj", "k_proj", "down_proj"], "layers_to_transform": [1]}),
    ],
)
def test_an_adapter_in_gguf_has_the_content_and_the_logits_of_pefts(
    served_base: Any, train: Any, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    base = served_base(family, False)
    trained = pairs_only(train(base, **settings))
    folder = as_gguf(trained.folder, tmp_path / "gguf", ARCHITECTURES[family], heads_of(base))
    audit, expected = audit_adapter(folder, base.config, "gguf"), trained.audit()
    assert audit.verdict == expected.verdict != "refused", audit.reasons
    assert audit.content_sha256 == expected.content_sha256
    engine = Engine(base.folder, EngineConfig(mode="auto", pool_bytes=4 << 20))
    engine.register_adapter(audit.content_sha256, folder, "gguf")
    prompt = (5, 9, 21, 40, 3)
    with torch.no_grad():
        logits = trained.model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(
        last_logits(engine, prompt, audit.content_sha256)[: len(logits)], logits, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_other_kinds_of_numbers_are_read_as_what_they_stand_for(
    llama: Any, train: Any, tmp_path: Path, kind: str
) -> None:
    trained = train(llama, target_modules=["q_proj", "up_proj"], r=32, lora_alpha=16)
    tensors = trained.tensors()
    # Rows of whole blocks of 32 numbers are those of B alone.
    number = GGMLQuantizationType[kind]
    rounded = {key: dequantize(quantize(value, number), number) for key, value in tensors.items() if "lora_B" in key}
    trained.write(tensors | rounded)
    ours = gguf_tensors(trained.folder, heads_of(llama))
    halves = {name: value for name, value in ours.items() if name.endswith("lora_b")}
    mixed = write_mixed(tmp_path / "gguf" / "x.gguf", ours, halves, kind)
    audit = audit_adapter(mixed.parent, llama.config, "gguf")
    assert audit.verdict == "exact", audit.reasons
    if kind == "Q8_0":  # B is widened to fp32, which PEFT's folder has too
        assert audit.content_sha256 == trained.audit().content_sha256
    else:
        from safetensors.torch import load_file, save_file

        stored = load_file(trained.folder / "adapter_model.safetensors")
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
        narrow = {key: value.to(dtype) if "lora_B" in key else value for key, value in stored.items()}
        save_file(narrow, trained.folder / "adapter_model.safetensors")
        assert audit.content_sha256 == trained.audit().content_sha256


def write_mixed(path: Path, tensors: dict[str, Any], packed: dict[str, Any], kind: str) -> Path:
    """A file whose tensors named in `packed` are of another kind than fp32."""
    from gguf import GGUFWriter

    path.parent.mkdir(exist_ok=True)
    writer, number = GGUFWriter(path, "llama"), GGMLQuantizationType[kind]
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for name, value in tensors.items():
        if name in packed:
            writer.add_tensor(name, quantize(value, number), raw_dtype=number)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def material(llama: Any, train: Any) -> tuple[Any, dict[str, Any]]:
    trained = train(llama, target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4)
    return trained, gguf_tensors(trained.folder, heads_of(llama))


@pytest.mark.parametrize("keys", [{}, {"adapter__lora__alpha": 0.0}])
def test_without_alpha_the_factor_is_one(material: Any, tmp_path: Path, keys: dict[str, Any]) -> None:
    trained, tensors = material
    write_gguf(tmp_path / "gguf" / "x.gguf", "llama", tensors, **keys)
    audit = audit_adapter(tmp_path / "gguf", trained.base.config, "gguf")
    assert {site.scaling for site in audit.sites} == {1.0}


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"general__type": "model"}, "the file is a model. Name it as --model"),
        ({"general__type": ..., "adapter__type": ...}, "the file is a model"),
        ({"general__type": "mmproj"}, "general.type='mmproj': expected 'adapter'"),
        ({"adapter__type": "control_vector"}, "adapter.type='control_vector': expected 'lora'"),
        ({"architecture": "qwen2"}, "general.architecture='qwen2': expected 'llama' for a base of llama"),
        ({"adapter__lora__alpha": -1.0}, "expected a number of at least 0"),
        ({"adapter__lora__alpha": float("nan")}, "expected a number of at least 0"),
        ({"adapter__lora__alpha": "8"}, "expected a number of at least 0"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"adapter__lora__warp": "9"}, "this key is not known"),
    ],
)
def test_metadata_that_means_something_else_is_refused(
    material: Any, tmp_path: Path, keys: dict[str, Any], what: str
) -> None:
    trained, tensors = material
    architecture = keys.pop("architecture", "llama")
    write_gguf(tmp_path / "gguf" / "x.gguf", architecture, tensors, **keys)
    audit = audit_adapter(tmp_path / "gguf", trained.base.config, "gguf")
    assert audit.verdict == "refused"
    assert what in " ".join(audit.reasons), audit.reasons


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("blk.0.attn_norm.weight", np.ones(16, np.float32), "not a pair of a linear layer"),
        ("blk.0.ssm_in.weight.lora_a", np.ones((2, 16), np.float32), "not a pair of a linear layer"),
        ("blk.7.attn_q.weight.lora_a", np.ones((2, 16), np.float32), "no linear layer 'model.layers.7"),
        ("blk.1.attn_output.weight.lora_b", np.ones((16, 2), np.float32), "its partner lora_a is missing"),
        ("blk.0.attn_q.weight.lora_b", np.ones((18, 2), np.float32), "has shape [18, 2], expected [16, 2]"),
        ("blk.0.attn_q.weight.lora_b", np.ones((24, 2), np.float32), "has shape [24, 2], expected [16, 2]"),
        ("blk.0.attn_v.weight.lora_a", np.ones(16, np.float32), "has shape [16]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(material: Any, tmp_path: Path, name: str, value: Any, what: str) -> None:
    trained, tensors = material
    write_gguf(tmp_path / "gguf" / "x.gguf", "llama", tensors | {name: value}, adapter__lora__alpha=4.0)
    audit = audit_adapter(tmp_path / "gguf", trained.base.config, "gguf")
    assert audit.verdict == "refused"
    assert what in " ".join(audit.reasons), audit.reasons


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"use_rslora": True}, "use_rslora=True: the file in GGUF has no room for it"),
        ({"alpha_pattern": {"q_proj": 1}}, "has no room for it"),
        ({"lora_alpha": 5}, "adapter.lora.alpha is 4.0, unclear which one is meant"),
    ],
)
def test_a_configuration_that_says_more_than_the_file_is_refused(
    material: Any, tmp_path: Path, keys: dict[str, Any], what: str
) -> None:
    trained, tensors = material
    write_gguf(tmp_path / "gguf" / "x.gguf", "llama", tensors, adapter__lora__alpha=4.0)
    config = json.loads((trained.folder / CONFIG).read_text())
    (tmp_path / "gguf" / CONFIG).write_text(json.dumps(config))
    assert audit_adapter(tmp_path / "gguf", trained.base.config, "gguf").verdict == "exact"
    (tmp_path / "gguf" / CONFIG).write_text(json.dumps(config | keys))
    assert what in " ".join(audit_adapter(tmp_path / "gguf", trained.base.config, "gguf").reasons)


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes()))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (damaged(lambda data: data[:-64]), "ends at byte"),
        (damaged(lambda data: data[:40]), "not a whole GGUF file"),
        (damaged(lambda data: b"GGML" + data[4:]), "does not start with 'GGUF'"),
        (damaged(lambda _: b""), "does not start with 'GGUF'"),
        (damaged(lambda data: data[:4] + struct.pack("<I", 9) + data[8:]), "version 9"),
        (damaged(lambda data: data[:8] + struct.pack("<Q", 2**62) + data[16:]), "not a whole GGUF file"),
        (damaged(lambda data: data[:16] + struct.pack("<Q", 2**40) + data[24:]), "not a whole GGUF file"),
        (lambda path: shutil.copyfile(path, path.with_name("y.gguf")), "several adapters in GGUF"),
    ],
)
def test_damaged_and_ambiguous_files_are_refused(material: Any, tmp_path: Path, damage: Any, what: str) -> None:
    trained, tensors = material
    path = write_gguf(tmp_path / "gguf" / "x.gguf", "llama", tensors, adapter__lora__alpha=4.0)
    damage(path)
    audit = audit_adapter(tmp_path / "gguf", trained.base.config, "gguf")
    assert audit.verdict == "refused"
    assert what in audit.reasons[0]
    assert len(audit.reasons) == 1


def test_a_kind_that_holds_no_pair_is_refused_by_name(material: Any, tmp_path: Path) -> None:
    trained, _ = material
    tensors = {"blk.0.attn_q.weight.lora_a": np.ones((2, 32), np.float32)}
    write_gguf(tmp_path / "gguf" / "x.gguf", "llama", tensors, kind="Q4_0")
    reasons = audit_adapter(tmp_path / "gguf", trained.base.config, "gguf").reasons
    assert "is stored as Q4_0, expected F16, BF16, F32 or Q8_0" in reasons[0]


def test_a_single_file_is_an_adapter(material: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trained, tensors = material
    path = write_gguf(tmp_path / "one-F32-LoRA.gguf", "llama", tensors, adapter__lora__alpha=4.0)
    folder = adapter_folder(str(path), {})
    assert adapter_folder(str(path), {}) == folder
    assert audit_adapter(folder, trained.base.config, "one").content_sha256 == trained.audit().content_sha256


def test_safetensors_beside_a_gguf_file_are_used_and_the_file_is_named(material: Any, tmp_path: Path) -> None:
    trained, tensors = material
    write_gguf(trained.folder / "x.gguf", "llama", tensors, adapter__lora__alpha=4.0)
    audit = trained.audit()
    assert audit.verdict == "exact"
    assert "x.gguf: not read, adapter_model.safetensors is used" in audit.notes
