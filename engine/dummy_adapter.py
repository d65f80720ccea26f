"""Adapters of random weights, for benchmarks: of a given rank on every linear layer, made on the device when needed.

They stand beside a base of random weights (`load_format="dummy"`), have no folder, and are served like any other.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from .adapter import AdapterAudit, LoraSite, ParameterChange
from .adapter.weights import AdapterWeights, LoraPair
from .model_config import ModelConfig

_SCALING = 2.0
# B small enough that a random adapter shifts the answers without drowning the base.
_DEVIATION_A, _DEVIATION_B = 0.02, 0.01


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
        folder=Path(os.devnull),
        verdict="exact",
        reasons=(),
        notes=(),
        content_sha256=hashlib.sha256(f"random {name} {rank}".encode()).hexdigest(),
        sites=sites,
        changes=tuple(ParameterChange(f"{site.module}.weight", shapes[site.module], site=site) for site in sites),
        max_rank=rank,
        vocab_size=model.vocab_size,
    )


def dummy_adapter_weights(audit: AdapterAudit, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    """The weights of a random adapter, the same each time: its identity is the seed."""
    assert audit.content_sha256 is not None
    seed = int(audit.content_sha256[:15], 16)
    # on the meta device there are shapes and no numbers
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0, deviation, generator=generator)

    pairs = {
        site.module: LoraPair(
            normal(site.rank, site.in_features, _DEVIATION_A),
            normal(site.out_features, site.rank, _DEVIATION_B),
            site.scaling,
        )
        for site in audit.sites
    }
    stored = {f"{module}.{half}": pair.a if half == "A" else pair.b for module, pair in pairs.items() for half in "AB"}
    return AdapterWeights(audit, stored, pairs, {change.parameter: change for change in audit.changes})
