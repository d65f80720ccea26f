"""Every model family against its oracle, on tiny random checkpoints made by transformers and adapters made by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft_oracle import weights_sha256
from tiny_bases import FAMILIES

from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft import audit_adapter

MakeFolder = Callable[..., Path]


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_of_chunked_prefill_and_decoding_equal_transformers(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = FAMILIES[case]
    folder = make_model(tmp_path, family, **settings)
    engine, model = compare.engine(folder), compare.model(folder)
    for num_tokens in (5, 70):  # within every window, and beyond
        prompt = compare.prompt(num_tokens, engine)
        compare.equal_everywhere(engine, prompt, compare.generate(model, prompt))


# What a model is made to forget, and the families in which that must show.
FORGOTTEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "windows": (["mistral windowed", "qwen2 windowed", "gemma2", "gemma3", "phi3"], {"window": None}),
    "attention caps": (["gemma2"], {"attention_softcap": None}),
    "logit caps": (["gemma2"], {"logit_softcap": None}),
    "attention scales": (["gemma2", "gemma3"], {"attention_scale": 32**-0.5}),
    "embedding scales": (["gemma", "gemma2", "gemma3"], {"embedding_scale": 1.0}),
    "the tanh form": (["gemma"], {"activation": "gelu"}),
    "norms from zero": (["gemma", "gemma2", "gemma3"], {"norm_kind": "rms"}),
    "the position offset": (["opt"], {"position_offset": 0}),
}


@pytest.mark.parametrize("setting", FORGOTTEN)
def test_what_sets_a_family_apart_shows_in_its_logits(
    setting: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    cases, changes = FORGOTTEN[setting]
    for case in cases:
        family, settings = FAMILIES[case]
        folder = make_model(tmp_path / case, family, **settings)
        engine = compare.engine(folder)
        prompt = compare.prompt(70, engine)
        _, logits = compare.record(engine, prompt)
        _, without = compare.record(compare.engine(folder, changes=changes), prompt)
        assert (without - logits).abs().max() > 2e-3, case


@pytest.mark.parametrize("case", ["mistral windowed", "gemma2", "gemma3", "opt", "phi3"])
def test_rows_of_other_lengths_in_the_same_batch_change_nothing(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = FAMILIES[case]
    folder = make_model(tmp_path, family, **settings)
    compare.equal_in_one_batch(compare.engine(folder), compare.model(folder))


ADAPTED = [case for case in FAMILIES if case not in ("llama tied", "mistral", "qwen2", "opt with projections")]


@pytest.mark.parametrize("case", ADAPTED)
def test_an_adapter_on_all_linear_layers_equals_peft_unmerged_and_merged(
    case: str, tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    family, settings = FAMILIES[case]
    folder = make_model(tmp_path / "base", family, **settings)
    adapter = make_adapter(tmp_path / "adapter", folder, r=4)
    prompt = compare.prompt(40, compare.engine(folder))
    expected = compare.generate(compare.model(folder, adapter), prompt)
    for mode in ("unmerged", "merged"):
        engine = compare.engine(folder, mode)
        compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))
        assert engine.telemetry().mode == mode
    of_base = compare.generate(compare.model(folder), prompt)
    assert (expected.logits - of_base.logits).abs().max() > 0.1


def test_an_adapter_on_opt_projections_runs_merged(
    tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    family, settings = FAMILIES["opt with projections"]
    folder = make_model(tmp_path / "base", family, **settings)
    adapter = make_adapter(tmp_path / "adapter", folder, r=4)
    engine = compare.engine(folder, "unmerged")
    assert audit_adapter(adapter, engine.model, "projections").verdict == "exact-by-merge"
    before = weights_sha256(engine)
    prompt = compare.prompt(40, engine)
    expected = compare.generate(compare.model(folder, adapter), prompt)
    compare.equal_everywhere(engine, prompt, expected, compare.register(engine, adapter))
    assert weights_sha256(engine) != before
    compare.serve(engine, {"base": prompt})
    assert weights_sha256(engine) == before


def test_one_a_serves_the_whole_packed_output_of_phi3(
    tmp_path: Path, make_model: MakeFolder, make_adapter: MakeFolder, compare: Any
) -> None:
    folder = make_model(tmp_path / "base", "phi3")
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, target_modules=["qkv_proj", "gate_up_proj"])
    audit = audit_adapter(adapter, read_model_config(folder), "packed")
    assert audit.verdict == "exact"
    assert {(site.module.rpartition(".")[2], site.out_features) for site in audit.sites} == {
        ("qkv_proj", 64 + 2 * 32),
        ("gate_up_proj", 2 * 96),
    }


def test_a_checkpoint_sharded_by_its_index_is_read_whole(tmp_path: Path, make_model: MakeFolder, compare: Any) -> None:
    folder = make_model(tmp_path, "qwen3")
    model = compare.model(folder)
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    engine = compare.engine(folder)
    prompt = compare.prompt(40, engine)
    compare.equal_everywhere(engine, prompt, compare.generate(model, prompt))
