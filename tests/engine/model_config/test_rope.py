"""Every kind of rotary embedding against transformers, with rows long enough for each kind to bite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.layer import RopeConfig

MakeFolder = Callable[..., Path]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 48,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", rope("linear", factor=4.0)),
    "dynamic": ("llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 48}),
    "yarn": ("qwen2", {**rope("yarn", factor=4.0, original_max_position_embeddings=32), "max_position_embeddings": 32}),
    "yarn, all settings": (
        "llama",
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.4,
            truncate=False,
        ),
    ),
    "llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "longrope": ("phi3", {**rope("longrope", **LONGROPE), "original_max_position_embeddings": 48}),
    "longrope, partial": (
        "phi3",
        {
            **rope("longrope", **LONGROPE, partial_rotary_factor=0.5),
            "head_dim": 32,
            "hidden_size": 128,
            "original_max_position_embeddings": 48,
        },
    ),
    "longrope of llama": ("llama", rope("longrope", **LONGROPE, attention_factor=1.3)),
    "partial": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "gemma3 by layer type": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20_000.0},
            },
        },
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_logits_of_chunked_prefill_and_decoding_equal_transformers(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = ROPES[case]
    folder = make_model(tmp_path, family, **settings)
    engine = compare.engine(folder)
    # only Phi-3 recomputes a row in transformers when longrope changes all its angles
    run = compare.recompute if case == "longrope of llama" else compare.generate
    for num_tokens in (43, 70):  # a row that grows beyond 48 tokens while decoding, and one that starts beyond
        prompt = compare.prompt(num_tokens, engine)
        compare.equal_everywhere(engine, prompt, run(compare.model(folder), prompt))


@pytest.mark.parametrize("case", ROPES)
def test_the_kind_of_rope_shows_in_the_logits(case: str, tmp_path: Path, make_model: MakeFolder, compare: Any) -> None:
    family, settings = ROPES[case]
    folder = make_model(tmp_path, family, **settings)
    engine = compare.engine(folder)
    prompt = compare.prompt(70, engine)
    _, logits = compare.record(engine, prompt)
    plain = RopeConfig(rotary_size=engine.model.head_dim)
    _, without = compare.record(compare.engine(folder, changes={"rope": plain}), prompt)
    assert (without - logits).abs().max() > 0.01


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_rows_of_other_lengths_in_the_same_batch_change_no_angles(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any
) -> None:
    family, settings = ROPES[case]
    folder = make_model(tmp_path, family, **settings)
    engine = compare.engine(folder)
    prompts = {f"row-{n}": compare.prompt(n, engine) for n in (3, 30, 44, 47, 60)}
    results = compare.serve(engine, prompts)
    for key, prompt in prompts.items():
        # a model of its own for each row: transformers' dynamic rope remembers the longest row it has seen
        assert results[key].token_ids == compare.generate(compare.model(folder), prompt).tokens, key


def test_stretched_ropes_lengthen_the_context(tmp_path: Path, make_model: MakeFolder) -> None:
    family, settings = ROPES["dynamic"]
    assert read_model_config(make_model(tmp_path / "dynamic", family, **settings)).max_context_tokens == 4 * 48
    family, settings = ROPES["yarn"]
    assert read_model_config(make_model(tmp_path / "yarn", family, **settings)).max_context_tokens == 4 * 32


OLD_SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2": ("gemma2", {"head_dim": 32}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    **{case: ROPES[case] for case in ("llama3", "yarn", "dynamic", "longrope, partial", "gemma3 by layer type")},
}


@pytest.mark.parametrize("case", OLD_SPELLINGS)
def test_configurations_in_the_spelling_of_transformers_4_mean_the_same(
    case: str, tmp_path: Path, make_model: MakeFolder
) -> None:
    family, settings = OLD_SPELLINGS[case]
    folder = make_model(tmp_path, family, **settings)
    new = read_model_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in raw
    assert "dtype" in raw
    old = in_old_spelling(raw)
    assert "rope_scaling" in old or case in ("llama", "gemma2", "qwen2")
    (folder / "config.json").write_text(json.dumps(old))
    assert read_model_config(folder) == new


def in_old_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 4 wrote it: rope_theta and rope_scaling, torch_dtype, no layer_types."""
    old = dict(raw)
    parameters = old.pop("rope_parameters")
    old["torch_dtype"] = old.pop("dtype")
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = old.pop("layer_types").index("full_attention") + 1
        parameters = parameters["full_attention"]
    old.pop("layer_types", None)
    scaling = dict(parameters)
    old["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    scaling["type"] = scaling.pop("rope_type")
    if scaling["type"] != "default":
        old["rope_scaling"] = scaling
    return old
