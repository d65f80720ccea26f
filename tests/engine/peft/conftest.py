"""A zoo of adapters over tiny bases: built, changed and saved by PEFT itself, then damaged by hand."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trained_adapters import Base, Trained, compute_logits, open_base, train_adapter

VOCAB_SIZE = 32
# OPT calls these sizes by other names; its embedding is narrower than its layers here.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 12, "init_std": 0.2},
    "gemma3_text": {"sliding_window": 64},
}


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
