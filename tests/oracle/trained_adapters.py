"""Adapters as PEFT has them in memory and in their folder, over a tiny base: trained, renamed, changed by hand."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft import AdapterAudit, audit_adapter


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
