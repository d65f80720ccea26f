"""Makes adapters of random weights for benchmarks: on a device when needed, or as PEFT folders.

Adapters on a device go with a base of random weights (`load_format="dummy"`), have no folder, and are served like any
other. Folders need no training and no PEFT.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...kernels.merge import LoraPair
from ..model_config.model import ModelConfig
from . import AdapterAudit, LoraSite, ParameterChange
from .weights import AdapterWeights

_SCALING = 2.0
#: Folder that the audits of random adapters name.
RANDOM_FOLDER = Path(os.devnull)
# Standard deviations of A and B; B is small enough that a random adapter shifts the answers without drowning the base.
_DEVIATIONS = (0.02, 0.01)
#: One standard deviation for both A and B that gives sums of the same size.
RANDOM_DEVIATION = 0.014


def dummy_audit(model: ModelConfig, rank: int, name: str) -> AdapterAudit:
    """The audit that an adapter of `rank` on all linear layers of the decoder layers would have.

    Raises ValueError for a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: a LoRA rank is at least 1")
    shapes = model.linear_shapes()
    sites = tuple(
        LoraSite(module, rank, _SCALING, f"{module}.A", f"{module}.B", shapes[module][1], shapes[module][0])
        for module in sorted(model.batched_modules())
    )
    return AdapterAudit(
        name=name,
        folder=RANDOM_FOLDER,
        verdict="exact",
        reasons=(),
        notes=(),
        content_sha256=hashlib.sha256(f"random {name} {rank}".encode()).hexdigest(),
        sites=sites,
        changes=tuple(ParameterChange(f"{site.module}.weight", shapes[site.module], site=site) for site in sites),
        max_rank=rank,
        vocab_size=model.vocab_size,
    )


def random_seed(audit: AdapterAudit) -> int:
    """The seed of a random adapter's numbers: its identity."""
    assert audit.content_sha256 is not None, f"{audit.name}: random adapters have a hash"
    return int(audit.content_sha256[:15], 16)


def dummy_adapter_weights(audit: AdapterAudit, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """The weights of a random adapter, the same each time: its identity is the seed."""
    # on the meta device there are shapes and no numbers
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(random_seed(audit))

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        matrix = torch.empty(rows, columns, dtype=dtype, device=device)
        return matrix if generator is None else matrix.normal_(0, deviation, generator=generator)

    pairs = {
        site.module: LoraPair(
            normal(site.rank, site.in_features, _DEVIATIONS[0]),
            normal(site.out_features, site.rank, _DEVIATIONS[1]),
            site.scaling,
        )
        for site in audit.sites
    }
    stored = {f"{module}.{half}": pair.a if half == "A" else pair.b for module, pair in pairs.items() for half in "AB"}
    return AdapterWeights(audit, stored, pairs, {change.parameter: change for change in audit.changes})


def write_random_adapter(
    folder: Path,
    model: ModelConfig,
    rank: int,
    seed: int,
    deviations: tuple[float, float] = _DEVIATIONS,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """An adapter of one rank on every linear layer of the decoder layers, alpha = 2 * rank, stored in `dtype`.

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
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a.to(dtype), b.to(dtype)
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
