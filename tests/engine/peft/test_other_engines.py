"""How other engines read an adapter: PEFT beside PEFT itself, vLLM by the rules of its source."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from other_forms import as_mlx
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lorabatch
from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.audit import AdapterAudit, audit_rows

LAYER = "base_model.model.model.layers.0"
Changed = Callable[..., Path]


@pytest.fixture
def changed(tiny_adapters: dict[str, Path], tmp_path: Path) -> Changed:
    """`changed(tensors, **keys)`: an adapter with tensors added, and keys of its configuration changed."""

    def make(tensors: dict[str, torch.Tensor], **keys: Any) -> Path:
        folder = tmp_path / "adapter"
        shutil.copytree(tiny_adapters["rank8"], folder, dirs_exist_ok=True)
        file = folder / "adapter_model.safetensors"
        save_file(load_file(file) | tensors, file)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | keys))
        return folder

    return make


def audited(folder: Path, model: Path) -> AdapterAudit:
    return audit_adapter(folder, read_model_config(model), "changed")


def test_tensors_that_peft_leaves_out_are_those_that_it_does_not_expect(changed: Changed, tiny_llama: Path) -> None:
    plain = json.loads((changed({}) / "adapter_config.json").read_text())
    assert "mlp" not in str(plain["target_modules"])
    pair = {f"lora_{x}.weight": torch.ones(shape) for x, shape in (("A", (8, 64)), ("B", (128, 8)))}
    strays = {
        **{f"{LAYER}.mlp.gate_proj.{end}": tensor.clone() for end, tensor in pair.items()},
        **{f"base_model.model.model.layers.77.self_attn.q_proj.{end}": t.clone() for end, t in pair.items()},
        f"{LAYER}.self_attn.q_proj.lora_scale_of_another_tool": torch.ones(1),
    }
    folder = changed(strays)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    loaded = model.load_adapter(folder, "again")
    expected = sorted(key.replace(".again", "") for key in loaded.unexpected_keys)
    assert expected == sorted(strays)
    found = audited(folder, tiny_llama)
    assert list(found.other_engines["peft"]["leaves_out"]) == expected
    assert found.verdict == "refused"
    assert "PEFT leaves out: 5 tensors, first " in audit_rows([found])[0][0][-1]


def test_an_adapter_that_all_read_alike_has_no_findings(tiny_adapters: dict[str, Path], tiny_llama: Path) -> None:
    assert audited(tiny_adapters["rank8"], tiny_llama).other_engines == {}


PAIR = {"lora_A": (8, 64), "lora_B": (128, 8)}


def pair_at(module: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a pair's tensors at a module of the tiny Llama's MLP."""
    return {f"base_model.model.{module}.{part}.weight": shape for part, shape in PAIR.items()}


@pytest.mark.parametrize(
    ("tensors", "keys", "kind", "said"),
    [
        ({}, {"use_dora": True}, "refuses", "use_dora"),
        ({}, {"modules_to_save": ["lm_head"]}, "refuses", "modules_to_save"),
        ({}, {"init_lora_weights": "pissa"}, "refuses", "init_lora_weights='pissa'"),
        ({}, {"bias": "lora_only"}, "refuses", "bias='lora_only'"),
        ({}, {"layer_replication": [[0, 2]]}, "refuses", "layer_replication"),
        ({}, {"rank_pattern": {"nothing": 24}}, "refuses", "rank 24 without --max-lora-rank 32"),
        ({}, {"rank_pattern": {"nothing": 1000}}, "refuses", "rank 1000, at most 512"),
        (
            {f"{LAYER}.self_attn.q_proj.lora_B.bias": (64,)},
            {"lora_bias": True},
            "refuses",
            "1 tensors that are no LoRA pair",
        ),
        (pair_at("model.layers.0.mlp.router"), {}, "refuses", "pairs on 1 modules, first model.layers.0.mlp.router"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": (8, 7)},
            {},
            "refuses",
            "a vocabulary of 7 tokens, the base has ",
        ),
        ({"base_model.model.model.embed_tokens.base_layer.weight": (64,)}, {}, "leaves_out", "embed_tokens.base_layer"),
        (pair_at("model.layers.77.mlp.up_proj"), {}, "leaves_out", "layers.77.mlp.up_proj.lora_A"),
        (pair_at("_orig_mod.model.layers.0.mlp.up_proj"), {}, "leaves_out", "_orig_mod"),
        (pair_at("model.layers.0.mlp.up_proj"), {}, "differs", "applies 2 tensors that are not targeted"),
    ],
)
def test_what_vllm_leaves_out_refuses_or_reads_otherwise_is_named(
    changed: Changed, tiny_llama: Path, tensors: dict[str, tuple[int, ...]], keys: dict[str, Any], kind: str, said: str
) -> None:
    found = audited(changed({key: torch.ones(shape) for key, shape in tensors.items()}, **keys), tiny_llama)
    findings = found.other_engines["vllm"][kind]
    assert any(said in text for text in findings), findings
    assert json.loads(json.dumps(found.to_json()))["other_engines"]["vllm"][kind] == list(findings)


def test_patterns_of_rank_and_alpha_are_no_finding(changed: Changed, tiny_llama: Path) -> None:
    found = audited(changed({}, alpha_pattern={"q_proj": 64}), tiny_llama)
    assert found.verdict == "exact"
    assert found.other_engines == {}


def test_a_configuration_without_targets_is_refused_by_vllm(changed: Changed, tiny_llama: Path) -> None:
    folder = changed({})
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["target_modules"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert "a configuration without target_modules" in audited(folder, tiny_llama).other_engines["vllm"]["refuses"]


def test_files_of_mlx_are_refused_by_vllm(changed: Changed, tiny_llama: Path, tmp_path: Path) -> None:
    found = audited(as_mlx(changed({}), tmp_path / "mlx"), tiny_llama)
    assert found.verdict == "exact"
    assert found.other_engines["vllm"]["refuses"][0].startswith("files of mlx-lm")


def test_a_rank_above_vllms_default_is_named(tiny_adapters: dict[str, Path], tiny_llama: Path) -> None:
    found = audited(tiny_adapters["rank64"], tiny_llama)
    assert found.verdict == "exact"
    assert found.other_engines == {"vllm": {"refuses": ("rank 64 without --max-lora-rank 64",)}}


def test_the_reference_has_every_field_of_the_json(tiny_adapters: dict[str, Path], tiny_llama: Path) -> None:
    text = (Path(lorabatch.__file__).parent / "docs" / "reference" / "adapters.md").read_text("utf-8")
    table = text[text.index("| field |") :].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    found = audited(tiny_adapters["rank8"], tiny_llama).to_json()
    assert sorted(documented) == sorted(found)
    assert found["format"] == 1
