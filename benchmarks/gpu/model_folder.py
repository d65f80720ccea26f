"""Model folders for the engine: a configuration, a tokenizer of numbers, and random weights where they must be read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.engine.config import read_model_config
from lorabatch.engine.models.load import dummy_weights


def write_model_folder(folder: Path, shape: ModelShape) -> Path:
    """A folder for `load_format="dummy"`: a token's text is its number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config_json()), encoding="utf-8")
    words = {f"{number} ": number for number in range(shape.vocab)}
    Tokenizer(WordLevel(words, unk_token="0 ")).save(str(folder / "tokenizer.json"))
    return folder


def write_weights(folder: Path) -> None:
    """Random weights for a folder, the same each time."""
    weights = dummy_weights(read_model_config(folder), torch.float32, torch.device("cpu"))
    save_file(weights, folder / "model.safetensors")
