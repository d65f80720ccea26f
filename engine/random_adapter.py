"""PEFT adapter folders with random weights of given ranks, to measure with: no training, no PEFT needed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .config import ModelConfig

# Of A and B; B small enough that a random adapter shifts the answers without drowning the base.
_DEVIATIONS = (0.02, 0.01)


def write_random_adapter(
    folder: Path, model: ModelConfig, rank: int, seed: int, deviations: tuple[float, float] = _DEVIATIONS
) -> Path:
    """An adapter of one rank on every linear layer of the decoder layers, alpha = 2 * rank, stored in fp32.

    `deviations`: standard deviations of the numbers in A and in B.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out_features, in_features) in model.linear_shapes().items():
        if module == "lm_head":
            continue
        prefix = f"base_model.model.{module}"
        a = torch.empty(rank, in_features).normal_(0, deviations[0], generator=generator)
        b = torch.empty(out_features, rank).normal_(0, deviations[1], generator=generator)
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({m.rsplit(".", 1)[1] for m in model.linear_shapes() if m != "lm_head"}),
        "bias": "none",
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
