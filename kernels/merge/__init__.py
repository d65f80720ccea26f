"""Merge pass: `W_live = round(W_base + sum over pairs: scaling * B A)`, for many linear layers in one launch.

W_base is the pristine copy and is only read; W_live has its own fixed address. Products and sum are fp32, rounded
once, so any number of merges gives the bits of the last one alone. Unmerging is a copy of W_base. Shapes: W
[out_features, in_features], A [rank, in_features], B [out_features, rank], A and B in the type they were stored in. The
Bs of one call are contiguous, or the transposes of contiguous ones, as the pool holds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import LoraPair, MergeJob

__all__ = ["LoraPair", "MergeJob", "merge_weights"]


def merge_weights(jobs: Sequence[MergeJob]) -> Tensor:
    """Fill every job's `live`. All weights share a device and a dtype, and so do all pairs; there is at least one job.

    Returns an int32 number on the device, not 0 when a merged weight is not finite; reading it waits. Raises
    ValueError when shapes do not fit or a tensor is not contiguous.
    """
    for index, job in enumerate(jobs):
        _check(f"job {index}", job)
    dtypes = {tensor.dtype for job in jobs for pair in job.pairs for tensor in (pair.a, pair.b)}
    if len(dtypes) > 1:
        raise ValueError(f"pairs of one merge must share a type, found {sorted(map(str, dtypes))}")
    if len({pair.b.is_contiguous() for job in jobs for pair in job.pairs if min(pair.b.shape) > 1}) > 1:
        raise ValueError("B of some pairs is transposed in memory, of others not; merge them in two calls")
    overflow = torch.zeros(1, dtype=torch.int32, device=jobs[0].live.device)
    from .triton import merge

    merge(jobs, dtypes.pop() if dtypes else torch.float32, overflow)
    return overflow


def _check(name: str, job: MergeJob) -> None:
    out_features, in_features = job.base.shape
    if job.live.shape != job.base.shape or job.live.dtype != job.base.dtype:
        raise ValueError(f"{name}: live and base must agree in shape and type")
    if job.live.data_ptr() == job.base.data_ptr():
        raise ValueError(f"{name}: live is base itself; merging would destroy the pristine weights")
    for pair in job.pairs:
        rank = pair.a.shape[0]
        if pair.a.shape != (rank, in_features) or pair.b.shape != (out_features, rank):
            raise ValueError(
                f"{name}: A {list(pair.a.shape)} and B {list(pair.b.shape)} do not fit W {list(job.base.shape)}"
            )
    tensors = (job.live, job.base, *(pair.a for pair in job.pairs))
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name}: every tensor must be contiguous")
    if not all(pair.b.is_contiguous() or pair.b.t().is_contiguous() for pair in job.pairs):
        raise ValueError(f"{name}: every B or its transpose must be contiguous")
