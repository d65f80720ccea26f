"""Models and adapters that are written for llama.cpp."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file

from lorabatch.benchmarks.engine.gguf_files import write_gguf_adapter, write_gguf_model
from lorabatch.benchmarks.engine.llama_cpp import run_llama_cpp
from lorabatch.benchmarks.engine.openvino import run_openvino
from lorabatch.benchmarks.engine.systems import run_ours
from lorabatch.benchmarks.engine.workload import make_workload
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.models.gguf.convert import convert_gguf


def test_a_model_comes_back_as_it_was(tiny_llama: Path, tmp_path: Path) -> None:
    write_gguf_model(tiny_llama, tmp_path / "model.gguf", GGMLQuantizationType.F32)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = load_file(tiny_llama / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name].float() == after[name].float()).all() for name in before)


def test_an_adapter_has_a_pair_for_each_layer(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> None:
    write_gguf_adapter(tiny_llama, tiny_adapters["rank8"], tmp_path / "adapter.gguf")
    written = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "adapter.gguf").tensors}
    pairs = load_file(tiny_adapters["rank8"] / "adapter_model.safetensors")
    assert len(written) == len(pairs)
    value = pairs["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].float().numpy()
    assert (written["blk.0.attn_v.weight.lora_b"] == value).all()


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    with pytest.raises(ValueError, match="model_type is 'qwen2'; only llama is written as GGUF"):
        write_gguf_model(tmp_path, tmp_path / "model.gguf", GGMLQuantizationType.F32)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")
def test_llama_cpp_answers_as_our_engine_does(tmp_path: Path) -> None:
    workload = make_workload(base_model_folder(), tmp_path, 4, 2)
    _, ours, _ = run_ours(workload, "unmerged", lambda row: row.adapter)
    _, base, _ = run_ours(workload, "unmerged", lambda row: None)
    assert ours != base
    assert run_llama_cpp(workload, "float32", True, lambda: 0.0)[1] == ours
    assert run_llama_cpp(workload, "float32", False, lambda: 0.0)[1] == base


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="needs openvino-genai")
def test_openvino_answers_as_our_engine_does(tmp_path: Path) -> None:
    workload = make_workload(base_model_folder(), tmp_path, 6, 3)
    _, base, _ = run_ours(workload, "unmerged", lambda row: None)
    assert run_openvino(workload, "float32", "base", lambda: 0.0)[1] == base
    # With adapters its logits are some hundredths away from those of PEFT, so that two of these rows differ.
    _, ours, _ = run_ours(workload, "unmerged", lambda row: row.adapter)
    _, theirs, _ = run_openvino(workload, "float32", "adapters", lambda: 0.0)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 4


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="needs openvino-genai")
def test_openvino_with_a_fused_adapter_answers_as_our_engine_does(tmp_path: Path) -> None:
    workload = make_workload(base_model_folder(), tmp_path, 6, 1)
    _, base, _ = run_ours(workload, "unmerged", lambda row: None)
    _, ours, _ = run_ours(workload, "merged", lambda row: row.adapter)
    _, theirs, _ = run_openvino(workload, "float32", "fused", lambda: 0.0)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 4
    assert base not in (ours, theirs)
