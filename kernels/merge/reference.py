"""The plain twin of `merge_weights`: one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import MergeJob


def merge(jobs: Sequence[MergeJob], pair_dtype: torch.dtype, overflow: Tensor) -> None:
    """Fill every job's `live` with the base and its pairs added in fp32; set `overflow` when one is not finite."""
    for job in jobs:
        value = job.base.float()
        delta = torch.zeros_like(value)
        for pair in job.pairs:
            assert pair.a.dtype == pair_dtype, f"{pair.a.dtype} among pairs of {pair_dtype}"
            delta = delta + pair.b.float() @ pair.a.float()
            if not pair.goes_on:
                value, delta = value + pair.scaling * delta, torch.zeros_like(value)
        job.live.copy_(value)
        if not torch.isfinite(job.live).all():
            overflow.fill_(1)
