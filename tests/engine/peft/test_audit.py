"""The audit as a whole: everything accounted for, damage refused by name, identity by content.

Audits as rows of text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.audit import AUDIT_COLUMNS, audit_rows

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def only_reason(trained: Any, **options: Any) -> str:
    """The one reason for refusal."""
    audit = trained.audit(**options)
    assert audit.verdict == "refused"
    assert audit.content_sha256 is None
    (reason,) = audit.reasons
    assert reason.startswith("adapter 'zoo': ")
    return str(reason)


def test_a_plain_adapter_is_exact_and_wholly_accounted_for(plain: Any) -> None:
    audit = plain.audit()
    assert (audit.verdict, audit.reasons, audit.notes) == ("exact", (), ())
    raw = json.loads((plain.folder / "adapter_config.json").read_text())
    assert audit.key_uses.keys() == raw.keys()
    assert audit.tensor_uses == dict.fromkeys(sorted(plain.tensors()), "used")
    assert audit.key_uses["r"] == "used"
    assert audit.key_uses["lora_dropout"] == "irrelevant: only acts during training"
    assert audit.max_rank == 2
    assert audit.weight_bytes == sum(value.nbytes for value in plain.tensors().values())
    assert audit.vocab_size == 32
    assert len(audit.sites) == 8
    assert audit.touched_parameters == tuple(sorted(f"{site.module}.weight" for site in audit.sites))


def test_a_site_tells_shapes_and_scaling(plain: Any) -> None:
    site = next(s for s in plain.audit().sites if s.module == "model.layers.1.self_attn.k_proj")
    assert (site.rank, site.in_features, site.out_features, site.scaling) == (2, 16, 8, 2.5)
    tensors = plain.tensors()
    assert tensors[site.a_key].shape == (2, 16)
    assert tensors[site.b_key].shape == (8, 2)


def test_an_audit_is_json(plain: Any) -> None:
    audit = plain.audit()
    value = json.loads(json.dumps(audit.to_json()))
    assert value["verdict"] == "exact"
    assert value["folder"] == str(plain.folder)
    assert value["sites"][0]["module"] == audit.sites[0].module
    assert value["content_sha256"] == audit.content_sha256
    assert len(value["content_sha256"]) == 64


# Identity


def test_the_same_content_in_other_clothes_has_the_same_hash(plain: Any, tmp_path: Path) -> None:
    expected = plain.audit().content_sha256
    raw = json.loads((plain.folder / "adapter_config.json").read_text())
    raw["target_modules"] = raw["target_modules"][::-1]
    raw |= {"lora_dropout": 0.3, "base_model_name_or_path": "elsewhere", "peft_version": "0.1", "inference_mode": False}
    (plain.folder / "adapter_config.json").write_text(json.dumps(raw))
    plain.rename(lambda key: key.replace(".weight", ".default.weight"))
    assert plain.audit().content_sha256 == expected
    tensors = plain.tensors()
    (plain.folder / "adapter_model.safetensors").unlink()
    write_sharded(plain.folder, tensors)
    moved = replace(plain, folder=plain.folder.rename(tmp_path / "moved"))
    assert moved.audit().content_sha256 == expected


def write_sharded(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    keys = sorted(tensors)
    shards = {"one.safetensors": keys[::2], "two.safetensors": keys[1::2]}
    for name, part in shards.items():
        save_file({key: tensors[key] for key in part}, folder / name)
    weight_map = {key: name for name, part in shards.items() for key in part}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("changes", [{"lora_alpha": 6}, {"use_rslora": True}, {"alpha_pattern": {"k_proj": 1}}])
def test_a_key_that_changes_the_computation_changes_the_hash(plain: Any, changes: dict[str, Any]) -> None:
    expected = plain.audit().content_sha256
    plain.configure(**changes)
    assert plain.audit().verdict == "exact"
    assert plain.audit().content_sha256 != expected


def test_one_changed_bit_changes_the_hash(plain: Any) -> None:
    expected = plain.audit().content_sha256
    tensors = plain.tensors()
    tensors[f"{Q}.lora_A.weight"].view(np.uint32)[1, 3] ^= 1
    plain.write(tensors)
    assert plain.audit().content_sha256 != expected


def test_two_swapped_layers_change_the_hash(plain: Any) -> None:
    expected = plain.audit().content_sha256
    tensors = plain.tensors()
    other = Q.replace("layers.0", "layers.1")
    for part in ("lora_A", "lora_B"):
        first, second = f"{Q}.{part}.weight", f"{other}.{part}.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]
    plain.write(tensors)
    assert plain.audit().content_sha256 != expected


def test_the_same_numbers_on_another_layer_have_another_hash(plain: Any) -> None:
    tensors = {key: value for key, value in plain.tensors().items() if "layers.0" in key}
    hashes = set()
    for layer in (0, 1):
        plain.configure(layers_to_transform=[layer])
        plain.write({key.replace("layers.0", f"layers.{layer}"): value for key, value in tensors.items()})
        hashes.add(plain.audit().content_sha256)
    assert None not in hashes
    assert len(hashes) == 2


def test_a_magnitude_and_token_rows_are_part_of_the_hash(train: Any, llama: Any) -> None:
    trained = train(llama, use_dora=True, trainable_token_indices=[3, 5])
    hashes = {trained.audit().content_sha256}
    for part in ("lora_magnitude_vector", "trainable_tokens_delta"):
        tensors = trained.tensors()
        key = next(key for key in tensors if key.endswith(part))
        tensors[key] = tensors[key] * np.float32(2)
        trained.write(tensors)
        hashes.add(trained.audit().content_sha256)
    trained.configure(trainable_token_indices=[3, 6])
    hashes.add(trained.audit().content_sha256)
    assert None not in hashes
    assert len(hashes) == 4


# Names


@pytest.mark.parametrize(
    ("trained_prefix", "note"),
    [
        ("model.language_model.", "model.language_model"),
        ("language_model.model.", "language_model"),
        ("language_model.", "language_model, read as model"),
        ("", "below model"),
    ],
)
def test_the_decoder_of_a_larger_model_is_read_under_its_prefix(plain: Any, trained_prefix: str, note: str) -> None:
    before = plain.audit()
    plain.rename(lambda key: key.replace("base_model.model.model.", f"base_model.model.{trained_prefix}"))
    audit = plain.audit()
    assert audit.verdict == "exact"
    assert audit.content_sha256 == before.content_sha256
    assert [site.module for site in audit.sites] == [site.module for site in before.sites]
    assert note in audit.notes[0]


def test_patterns_are_matched_with_the_names_of_training(plain: Any) -> None:
    plain.rename(lambda key: key.replace("model.model.layers", "model.model.language_model.layers"))
    plain.configure(alpha_pattern={"^model.language_model.layers.1.self_attn.q_proj": 9, "^model.layers.0.*": 100})
    scalings = {site.module: site.scaling for site in plain.audit().sites}
    assert scalings["model.layers.1.self_attn.q_proj"] == 4.5
    assert scalings["model.layers.0.self_attn.q_proj"] == 2.5


def test_one_layer_under_two_names_is_refused(plain: Any) -> None:
    tensors = plain.tensors()
    copies = {key.replace("model.model.layers", "model.model.language_model.layers"): v for key, v in tensors.items()}
    plain.write(tensors | copies)
    plain.configure(target_modules=".*self_attn.(q|k|v|o)_proj")
    audit = plain.audit()
    assert audit.verdict == "refused"
    assert any("layers" in reason for reason in audit.reasons)


def test_two_adapters_in_one_file_are_refused(plain: Any) -> None:
    tensors = plain.tensors()
    both = {key.replace(".weight", f".{name}.weight"): v for name in ("a", "b") for key, v in tensors.items()}
    plain.write(both)
    audit = plain.audit()
    assert audit.verdict == "refused"
    assert "plays the same part as" in audit.reasons[0]
    # Also when each has layers of its own, so that no tensor stands twice.
    plain.write({key: v for key, v in both.items() if ("layers.0" in key) == (".a." in key)})
    assert "tensor names hold several adapters (a, b), expected one" in only_reason(plain)


def test_one_pair_given_twice_is_refused(plain: Any) -> None:
    tensors = plain.tensors()
    plain.write(tensors | {f"{Q}.lora_A.default.weight": tensors[f"{Q}.lora_A.weight"] * 2})
    assert "plays the same part as" in only_reason(plain)


# Damage


def test_nan_and_infinity_are_refused_wherever_they_are(plain: Any) -> None:
    for value in (np.nan, np.inf, -np.inf):
        tensors = plain.tensors()
        broken = tensors | {f"{Q}.lora_B.weight": tensors[f"{Q}.lora_B.weight"].copy()}
        broken[f"{Q}.lora_B.weight"][3, 1] = value
        plain.write(broken)
        assert f"{Q}.lora_B.weight: holds NaN or infinity" in only_reason(plain)
        plain.write(tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_seen_in_half_precision(plain: Any, dtype: str, value: float) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = plain.folder / "adapter_model.safetensors"
    tensors = {key: tensor.to(getattr(torch, dtype)) for key, tensor in load_file(file).items()}
    save_file(tensors, file)
    assert plain.audit().verdict == "exact"
    tensors[f"{Q}.lora_A.weight"][0, 0] = value
    save_file(tensors, file)
    assert "holds NaN or infinity" in only_reason(plain)


def test_large_and_tiny_numbers_are_finite(plain: Any) -> None:
    tensors = plain.tensors()
    tensors[f"{Q}.lora_A.weight"][0, :3] = (3.4e38, -3.4e38, 1e-45)
    plain.write(tensors)
    assert plain.audit().verdict == "exact"


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_an_adapter_without_any_effect_is_refused(plain: Any, part: str) -> None:
    zeroed = {key: value * np.float32(0 if part in key else -1) for key, value in plain.tensors().items()}
    plain.write(zeroed)
    reason = only_reason(plain)
    assert "every pair has no effect" in reason
    assert "Save the adapter after training" in reason


def test_an_untrained_adapter_is_refused(train: Any, llama: Any) -> None:
    from peft import LoraConfig, get_peft_model

    trained = train(llama)
    get_peft_model(llama.fresh(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(trained.folder)
    assert "every pair has no effect" in only_reason(trained)


def test_alpha_zero_has_no_effect(plain: Any) -> None:
    plain.configure(lora_alpha=0)
    assert "every pair has no effect" in only_reason(plain)


def test_some_idle_pairs_are_fine(plain: Any) -> None:
    tensors = plain.tensors()
    plain.write(tensors | {f"{Q}.lora_B.weight": np.zeros_like(tensors[f"{Q}.lora_B.weight"])})
    assert plain.audit().verdict == "exact"


def test_without_reading_values_nothing_is_known_of_them(plain: Any) -> None:
    tensors = plain.tensors()
    tensors[f"{Q}.lora_A.weight"][0, 0] = np.nan
    plain.write(tensors)
    audit = plain.audit(check_values=False)
    assert (audit.verdict, audit.content_sha256) == ("exact", None)


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int32"])
def test_other_storage_types_are_refused(plain: Any, dtype: str) -> None:
    tensors = plain.tensors()
    plain.write(tensors | {f"{Q}.lora_A.weight": tensors[f"{Q}.lora_A.weight"].astype(dtype)})
    audit = plain.audit()
    assert audit.verdict == "refused"
    assert any("expected one of F16, BF16, F32" in reason for reason in audit.reasons)


def test_an_unknown_tensor_is_refused_by_name(plain: Any) -> None:
    key = f"{Q}.lora_diag.weight"
    plain.write(plain.tensors() | {key: np.ones(2, np.float32)})
    assert f"{key}: not a tensor this audit knows" in only_reason(plain)


def test_an_adapter_for_another_base_is_refused_with_one_reason(bases: Any, plain: Any) -> None:
    wide = replace(plain.base.config, hidden_size=64, embedding_size=64)
    audit = audit_adapter(plain.folder, wide, "zoo")
    (reason,) = audit.reasons
    assert "has shape [2, 16], expected [2, 64]. The adapter belongs to another base; use the" in reason
    assert reason.endswith("one it was trained on (and 7 more like it)"), reason
    assert all(use.startswith("refused: ") for use in audit.tensor_uses.values())


def test_layers_the_base_does_not_have_are_refused(plain: Any) -> None:
    base = plain.base.config
    shallow = replace(base, layers=base.layers[:1])
    (reason,) = audit_adapter(plain.folder, shallow, "zoo").reasons
    assert "the base has no linear layer 'model.layers.1.self_attn." in reason


def test_an_adapter_of_another_architecture_matches_nothing_and_is_refused(plain: Any) -> None:
    plain.rename(lambda key: key.replace("self_attn.", "attention."))
    plain.configure(target_modules=[f"attention.{part}_proj" for part in "qkvo"])
    assert "the base has no linear layer" in only_reason(plain)


def test_several_problems_are_joined(plain: Any) -> None:
    (plain.folder / "adapter_model.safetensors").write_bytes(b"broken")
    plain.configure(peft_type="IA3", lora_alpha="x", task_type="TOKEN_CLS", warp=1)
    text = "\n".join(plain.audit().reasons)
    for what in ("peft_type='IA3'", "lora_alpha='x'", "task_type='TOKEN_CLS'", "warp=1", "adapter_model.safetensors"):
        assert what in text


@pytest.mark.parametrize("which", ["all", "the last"])
def test_shells_of_zero_3_are_refused_by_that_name(plain: Any, which: str) -> None:
    tensors = plain.tensors()
    shells = list(tensors) if which == "all" else list(tensors)[-1:]
    plain.write({key: np.zeros(0, np.float32) if key in shells else value for key, value in tensors.items()})
    reason = only_reason(plain)
    assert "has shape [0], as DeepSpeed ZeRO-3 leaves a tensor" in reason
    assert "zero_to_fp32.py" in reason
    assert (" more like it" in reason) == (which == "all")


def test_a_file_without_tensors_is_refused_as_a_shell_of_zero_3(plain: Any) -> None:
    plain.write({})
    assert (plain.folder / "adapter_model.safetensors").stat().st_size < 40
    assert "holds no tensors, as DeepSpeed ZeRO-3 leaves" in only_reason(plain)


def test_a_decoder_s_adapter_that_calls_itself_seq_2_seq_is_served(plain: Any) -> None:
    before = plain.audit().content_sha256
    plain.configure(task_type="SEQ_2_SEQ_LM")
    assert plain.audit().content_sha256 == before


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_refused(plain: Any, name: str) -> None:
    (plain.folder / name).unlink()
    assert f"{name}: missing" in only_reason(plain)


def test_a_folder_that_is_not_there_is_refused(plain: Any) -> None:
    gone = replace(plain, folder=plain.folder / "gone")
    assert "not a folder" in only_reason(gone)


# Many


def test_auditing_needs_no_torch(plain: Any) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from lorabatch.engine.peft import audit_adapter\n"
        "from lorabatch.engine.config import read_model_config\n"
        "audit = audit_adapter(Path(sys.argv[1]), read_model_config(Path(sys.argv[2])), 'x')\n"
        "print(audit.verdict, sorted({'torch', 'transformers', 'peft', 'dask'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(plain.folder), str(plain.base.folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "exact []\n"


def test_one_row_tells_verdict_size_and_remarks(plain: Any, train: Any, llama: Any) -> None:
    (plain.folder / "tokenizer.json").write_text("{}")
    dora = train(llama, use_dora=True).audit()
    broken = train(llama, r=3)
    broken.configure(r=5, target_modules=["q_proj", "wte"])
    (first, second, third), _ = audit_rows([plain.audit(), dora, broken.audit()])
    assert first == ("zoo", "exact", "2", "8", "0.0", "its rows are tokenised by its own tokenizer.json")
    assert second[:4] == ("zoo", "exact-by-merge", "2", "2")
    assert second[5].startswith("adapter 'zoo': use_dora=True: ")
    assert third[:2] == ("zoo", "refused")
    assert "has rank 3, expected 5" in third[5]
    assert "wte, which this base does not have" in third[5]
    assert len(AUDIT_COLUMNS) == len(first)


def test_a_note_that_adapters_share_stands_below_the_rows_once(plain: Any) -> None:
    notes = {"a": ("own", "all"), "b": ("all",), "c": ()}
    audits = [replace(plain.audit(), name=name, notes=notes[name]) for name in notes]
    rows, shared = audit_rows(audits)
    assert [row[5] for row in rows] == ["own", "", ""]
    assert shared == ["a, b: all"]
    _, shared = audit_rows([replace(audits[1], name=str(number)) for number in range(9)])
    assert shared == ["0, 1, 2, 3, 4 and 4 more: all"]


def test_every_tensor_has_its_use(plain: Any) -> None:
    audit = plain.audit()
    assert audit.key_uses["lora_dropout"] == "irrelevant: only acts during training"
    assert audit.tensor_uses.keys() == plain.tensors().keys()


def test_adapters_that_are_alike_are_judged_once_and_each_by_its_own_values(plain: Any, tmp_path: Path) -> None:
    plain.write(plain.tensors())  # as the others are written
    other = replace(plain, folder=tmp_path / "other")
    shutil.copytree(plain.folder, other.folder)
    other.configure(
        target_modules=json.loads((plain.folder / "adapter_config.json").read_text())["target_modules"][::-1]
    )
    other.write({key: 2 * value for key, value in plain.tensors().items()})
    bad = replace(plain, folder=tmp_path / "bad")
    shutil.copytree(plain.folder, bad.folder)
    bad.write({key: value * np.nan for key, value in plain.tensors().items()})
    first, second, third = (
        audit_adapter(trained.folder, plain.base.config, trained.folder.name) for trained in (plain, other, bad)
    )
    assert first.sites is second.sites is third.sites
    assert first.tensor_uses is second.tensor_uses
    assert (first.verdict, second.verdict, third.verdict) == ("exact", "exact", "refused")
    assert None is not first.content_sha256 != second.content_sha256 is not None
    assert third.content_sha256 is None
    assert all(reason.startswith("adapter 'bad': ") for reason in third.reasons)
    # what was found of one stays with it
    assert first.reasons == second.reasons == ()
    assert set(audit_adapter(other.folder, plain.base.config, "other").tensor_uses.values()) == {"used"}


def test_another_configuration_or_base_is_judged_anew(plain: Any, tmp_path: Path, bases: Any) -> None:
    other = replace(plain, folder=tmp_path / "other")
    shutil.copytree(plain.folder, other.folder)
    other.configure(lora_alpha=1)
    assert {site.scaling for site in other.audit().sites} != {site.scaling for site in plain.audit().sites}
    other.configure(r=3)
    assert "has rank" in only_reason(other)
    foreign = audit_adapter(plain.folder, bases("qwen2", False).config, "foreign")
    assert foreign.sites is not plain.audit().sites
    assert plain.audit().verdict == "exact"
