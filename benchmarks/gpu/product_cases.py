"""The products of mode `exact` at the sizes of one layer of a step, and torch's, which they stand in for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from lorabatch.benchmarks.gpu.kernel_cases import KernelCase
from lorabatch.kernels.invariant_linear import invariant_linear

_SITES = ("qkv", "o", "gate_up", "down")


def product_cases(weights: Sequence[Tensor], num_rows: int) -> list[KernelCase]:
    """Two cases for each of a layer's base products of `num_rows` rows: in mode `exact` and by torch. Torch's product
    is the `twin` of both."""
    return [case for site, weight in zip(_SITES, weights, strict=True) for case in _products(site, weight, num_rows)]


def _products(site: str, weight: Tensor, num_rows: int) -> list[KernelCase]:
    out_features, in_features = weight.shape
    x = torch.randn(num_rows, in_features, device=weight.device).to(weight.dtype)
    num_bytes = float(weight.element_size() * (weight.numel() + x.numel() + num_rows * out_features))
    flops = 2.0 * num_rows * weight.numel()

    def by_torch() -> Tensor:
        return linear(x, weight)

    return [
        KernelCase(f"exact product {site}", num_bytes, flops, lambda: invariant_linear(x, weight), by_torch),
        KernelCase(f"torch product {site}", num_bytes, flops, by_torch, by_torch),
    ]
