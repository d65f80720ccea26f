"""A zoo of adapters over tiny bases: built, changed and saved by PEFT itself, then damaged by hand."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft import AdapterAudit, audit_adapter

VOCAB_SIZE = 32
# OPT calls these sizes by other names; its embedding is narrower than its layers here.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 12, "init_std": 0.2},
    "gemma3_text": {"sliding_window": 64},
}


@dataclass(frozen=True)
class Base:
    """A tiny random model on disk and in memory. Use `fresh()`: PEFT changes the models it is given."""

    folder: Path
    config: ModelConfig
    model: Any

    def fresh(self) -> Any:
        """A copy of the model in memory."""
        return copy.deepcopy(self.model)


@dataclass(frozen=True)
class Trained:
    """An adapter as its trainer has it in memory, and its folder."""

    base: Base
    folder: Path
    model: Any
    vocab_size: int

    def audit(self, **options: Any) -> AdapterAudit:
        """The audit of the folder against the base it was made for."""
        return audit_adapter(self.folder, self.base.config, "zoo", **options)

    def logits(self) -> Any:
        """PEFT's logits, unmerged: see `compute_logits`."""
        return compute_logits(self.model, self.vocab_size)

    def tensors(self) -> dict[str, Any]:
        """All tensors of the folder, as NumPy arrays."""
        from safetensors.numpy import load_file

        return load_file(self.folder / "adapter_model.safetensors")

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Replace the tensors of the folder."""
        from safetensors.numpy import save_file

        arrays = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        save_file(arrays, self.folder / "adapter_model.safetensors")

    def rename(self, rename: Callable[[str], str]) -> None:
        """Rename every tensor of the folder."""
        self.write({rename(key): value for key, value in self.tensors().items()})

    def configure(self, **changes: Any) -> None:
        """Set keys of `adapter_config.json`; the value `...` removes a key."""
        file = self.folder / "adapter_config.json"
        value = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def compute_logits(model: Any, vocab_size: int) -> Any:
    """Logits of a transformers or PEFT model over the whole vocabulary as one prompt."""
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(vocab_size)[None]).logits


def build_base(folder: Path, family: str, is_tied: bool) -> Base:
    """A random two-layer model with grouped-query attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=is_tied,
        pad_token_id=None,
        eos_token_id=1,
        **FAMILY_SETTINGS.get(family, {}),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return open_base(folder)


def open_base(folder: Path) -> Base:
    """A base from a model folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Base(folder, read_model_config(folder), model)


def train_adapter(base: Base, folder: Path, vocab_size: int | None = None, **lora: Any) -> Trained:
    """Have PEFT build an adapter, move everything trainable away from its start, and save it."""
    import torch
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    torch.manual_seed(1)
    model = base.fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if vocab_size is not None:
            model.resize_token_embeddings(vocab_size)
        trained = get_peft_model(model, LoraConfig(**(settings | lora))).eval()
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        trained.create_or_update_model_card = lambda folder: None  # its README.md takes most of the time
        trained.save_pretrained(folder)
    return Trained(base, folder, trained, vocab_size or base.config.vocab_size)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Base]:
    """`bases(family, is_tied)`: each is built once."""

    @functools.cache
    def get(family: str, is_tied: bool) -> Base:
        return build_base(tmp_path_factory.mktemp("bases") / family, family, is_tied)

    return get


@pytest.fixture(scope="session")
def llama(bases: Callable[[str, bool], Base]) -> Base:
    """An untied Llama, without biases."""
    return bases("llama", False)


@pytest.fixture(scope="session")
def served_base(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], Base]:
    """`served_base(family, is_tied)`: a base with a tokenizer, as the engine needs it; each is built once."""

    @functools.cache
    def get(family: str, is_tied: bool) -> Base:
        folder = tmp_path_factory.mktemp("served") / family
        return open_base(make_model(folder, family=family, tie_word_embeddings=is_tied))

    return get


@pytest.fixture
def logits() -> Callable[[Any, int], Any]:
    """`logits(model, vocab_size)`: see `compute_logits`."""
    return compute_logits


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """`train(base, name="adapter", vocab_size=None, **lora_config)`: see `train_adapter`."""

    def build(base: Base, name: str = "adapter", **settings: Any) -> Trained:
        return train_adapter(base, tmp_path / name, **settings)

    return build


@pytest.fixture(scope="session")
def plain_once(llama: Base, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("plain") / "adapter"
    return train_adapter(llama, folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


@pytest.fixture
def plain(plain_once: Trained, tmp_path: Path) -> Trained:
    """A plain adapter on all projections of attention, in a folder that may be damaged."""
    return replace(plain_once, folder=shutil.copytree(plain_once.folder, tmp_path / "plain"))
