"""Batch-invariant products: `y = x W^T + bias`, where the bits of a row of y depend on that row of x and on W alone.

Libraries choose tiles and splits of the contraction by the number of rows, and so round a row by how many are beside it
(He et al. 2025, Defeating nondeterminism in LLM inference). Here the contraction is cut into splits by the shape of W
alone (`splits`). Each split is summed in the order of its features by one kind of matrix instruction, and
splits are added in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """New tensor [num_rows, out_features] of `x` [num_rows, in_features], `weight` [out_features, in_features] and
    `bias` [out_features], all contiguous and of one type."""
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert x.dtype == weight.dtype, f"x is in {x.dtype}, weight in {weight.dtype}"
    assert x.shape[1] == weight.shape[1], f"x {tuple(x.shape)} has not the features of weight {tuple(weight.shape)}"
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    from .triton import multiply_rows

    if out.numel():
        multiply_rows(out, x, weight, bias)
    return out
