"""Which files and tensors of a base folder are read, as transformers decides; every other file has its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.errors import ModelFilesError
from lorabatch.engine.model_config.folder import INDEX, IRRELEVANT, READ, SINGLE, irrelevance, look_at, weight_files
from lorabatch.engine.models.load import load_weights

EMBEDDING = {"opt": "model.decoder.embed_tokens.weight"}
HEAD = "lm_head.weight"
Make = Callable[..., Path]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE)


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})


def shards(folder: Path, weights: dict[str, torch.Tensor], count: int = 2) -> None:
    """Write weights as shards with their index."""
    names = sorted(weights)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        save({name: weights[name] for name in names[i::count]}, folder / file)
    weight_map = {name: files[i % count] for i, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def loaded(folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Tensors that an engine computes with, and whether it ties the head."""
    model = read_model_config(folder)
    weights: Any = load_weights(folder, model, EngineConfig(), torch.device("cpu"), torch.float32)
    return weights, model.is_tied


def head_of_transformers(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_output_embeddings().weight.detach()


@pytest.fixture
def tied(make_model: Make, tmp_path: Path) -> Callable[[str], Path]:
    """`tied(family)`: a folder whose configuration ties the head."""
    return lambda family: make_model(tmp_path / "model", family, tie_word_embeddings=True, **SIZES.get(family, {}))


SIZES: dict[str, dict[str, Any]] = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "gemma2": {"head_dim": 16}}


@pytest.mark.parametrize("family", ["llama", "qwen2", pytest.param("gemma2", marks=pytest.mark.long), "opt"])
def test_a_head_that_differs_is_kept_beside_a_tied_configuration(tied: Callable[[str], Path], family: str) -> None:
    folder, embedding = tied(family), EMBEDDING.get(family, "model.embed_tokens.weight")
    weights = tensors(folder)
    assert HEAD not in weights
    assert loaded(folder)[1]
    weights[HEAD] = weights[embedding].clone()
    save(weights, folder / SINGLE)
    assert loaded(folder)[1], "an equal head is tied"
    weights[HEAD][3] += 1.0
    save(weights, folder / SINGLE)
    found, is_tied = loaded(folder)
    assert not is_tied
    assert torch.equal(found[HEAD], head_of_transformers(folder))
    assert torch.equal(found[embedding], weights[embedding])
    shards(folder, weights)
    (folder / SINGLE).unlink()
    assert torch.equal(loaded(folder)[0][HEAD], found[HEAD]), "the tensors may be in different shards"


def test_a_tied_model_may_store_its_one_tensor_as_the_head(tied: Callable[[str], Path]) -> None:
    folder = tied("llama")
    weights = tensors(folder)
    weights[HEAD] = weights.pop("model.embed_tokens.weight")
    save(weights, folder / SINGLE)
    found, is_tied = loaded(folder)
    assert is_tied
    assert torch.equal(found["model.embed_tokens.weight"], head_of_transformers(folder))


def test_a_head_of_another_number_format_is_its_own(tied: Callable[[str], Path]) -> None:
    folder = tied("llama")
    weights = tensors(folder)
    weights[HEAD] = weights["model.embed_tokens.weight"].to(torch.bfloat16)
    save(weights, folder / SINGLE)
    assert torch.equal(loaded(folder)[0][HEAD], head_of_transformers(folder))


@pytest.mark.parametrize("count", [1, 2])
def test_one_file_is_read_before_shards_as_transformers_does(tied: Callable[[str], Path], count: int) -> None:
    folder = tied("llama")
    weights = tensors(folder)
    shards(folder, {name: tensor + 1.0 for name, tensor in weights.items()}, count)
    found, _ = loaded(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert torch.equal(head_of_transformers(folder), weights["model.embed_tokens.weight"])
    (note,), _ = look_at(folder)
    assert note.startswith(f"not read, because {SINGLE} is, as in transformers: model-00001-of-0000{count}.safetensors")
    assert INDEX in note


def test_shards_that_the_index_leaves_out_are_named(tied: Callable[[str], Path]) -> None:
    folder = tied("llama")
    shards(folder, tensors(folder))
    (folder / SINGLE).rename(folder / "model-00003-of-00003.safetensors")
    assert [path.name for path in weight_files(folder)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (note,), _ = look_at(folder)
    assert note == f"not read, because {INDEX} is, as in transformers: model-00003-of-00003.safetensors"


def test_a_tensor_in_two_shards_is_refused_by_name(tied: Callable[[str], Path]) -> None:
    folder = tied("llama")
    weights = tensors(folder)
    shards(folder, weights)
    save(weights, folder / "model-00001-of-00002.safetensors")
    (folder / SINGLE).unlink()
    with pytest.raises(ModelFilesError, match="in two files of the checkpoint, unclear which one is meant"):
        loaded(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"weight_map": {"a": "../b.safetensors"}}, "must name files of this folder"),
        ({"weight_map": {}}, "must name files of this folder, found none"),
        ({}, "expected a JSON object with weight_map"),
        ([], "expected a JSON object with weight_map"),
    ],
)
def test_an_index_that_names_no_files_of_the_folder_is_refused(tmp_path: Path, content: Any, expected: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(ModelFilesError, match=expected):
        weight_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=f"neither {SINGLE} nor {INDEX}"):
        look_at(tmp_path)
    assert look_at(tmp_path, with_weights=False) == ([], [])


def test_files_of_published_models_are_all_accounted_for(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    known = [
        ".gitattributes",
        "LICENSE",
        "LICENSE.txt",
        "README.md",
        "USE_POLICY.md",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "vocab.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "original",
        "consolidated.safetensors",
        "params.json",
        "tekken.json",
        "configuration_phi3.py",
        "modeling_phi3.py",
        "flax_model.msgpack",
        "tf_model.h5",
        "training_args.bin",
        "trainer_state.json",
        "optimizer.pt",
        "rng_state_0.pth",
        "scheduler.pt",
        "all_results.json",
        "runs",
        "onnx",
        "model.gguf",
        "preprocessor_config.json",
        "processor_config.json",
        "sample_finetune.py",
        "NOTICE.md",
        "figures",
        "global_step100",
        "latest",
        "zero_to_fp32.py",
        "checkpoint-500",
        "train_results.json",
    ]
    for name in known:
        (tmp_path / name).touch()
    assert look_at(tmp_path) == ([], [])


def test_files_of_no_known_kind_are_named_and_an_adapter_is_refused(tmp_path: Path) -> None:
    for name in (SINGLE, "mine.dat", "model.fp16.safetensors", "adapter_config.json"):
        (tmp_path / name).touch()
    notes, (problem,) = look_at(tmp_path)
    assert notes == [
        f"not read, because {SINGLE} is, as in transformers: model.fp16.safetensors",
        "files that nothing reads: mine.dat",
    ]
    assert problem.startswith("adapter_config.json: an adapter in the base model's folder")


def test_a_file_is_read_or_irrelevant_never_both() -> None:
    assert not [name for name in (*READ, SINGLE, INDEX) if irrelevance(name.partition("/")[0]) and "/" not in name]
    assert all(why for why in IRRELEVANT.values())
