"""First of all: is it right? Kernels against their twins, and a layer unmerged against the same layer merged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorabatch.benchmarks.gpu.kernel_cases import kernel_cases
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.shapes import TINY
from lorabatch.kernels.merge import merge_weights
from lorabatch.kernels.packed_weight.fp8 import Fp8Weight, quantize_rows

# Error relative to the largest number: a few roundings. A layer passes through seven products and roundings.
KERNEL_LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LAYER_LIMITS = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_RANKS = [1, 8, 20, 64]


def check_all(
    dtypes: list[torch.dtype], device: torch.device, kernel_limits: Mapping[torch.dtype, float] = KERNEL_LIMITS
) -> list[str]:
    """Compares kernels with their references, and a merged layer with an unmerged one, in each of `dtypes`. Returns
    differences above the limits as sentences: none when all is right."""
    problems = []
    for dtype in dtypes:
        torch.manual_seed(0)
        layer = StepLayer(TINY, batch=6, context=40, ranks=_RANKS, dtype=dtype, device=device, num_programs=1)
        for case in kernel_cases(layer, _RANKS):
            expected = case.twin()
            problems += _problem(f"{case.name} in {dtype}", case.run(), expected, kernel_limits[dtype])
        problems += _merged_equals_unmerged(dtype, device)
    return problems


def check_fp8(device: torch.device) -> list[str]:
    """Compares a product in 8 bits with that of the same codes in fp64. Returns a difference above the limit as a
    sentence."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = (torch.randn(160, 96, device=device) * 0.02).to(dtype)
    x = torch.randn(33, 96, device=device).to(dtype)
    packed = Fp8Weight(weight)
    codes, scales = quantize_rows(x)
    expected = (codes.double() * scales) @ packed.dense().double().t()
    return _problem("products in 8 bits", packed.multiply(x, None), expected, KERNEL_LIMITS[dtype])


def _merged_equals_unmerged(dtype: torch.dtype, device: torch.device) -> list[str]:
    layer = StepLayer(TINY, batch=5, context=20, ranks=[20], dtype=dtype, device=device, num_programs=4)
    x = torch.randn(5, TINY.hidden, device=device).to(dtype)
    unmerged = layer.forward(x)
    live, jobs = layer.merge_jobs(0)
    merge_weights(jobs)
    layer.without_lora(live)
    return _problem(f"layer merged and unmerged in {dtype}", unmerged, layer.forward(x), _LAYER_LIMITS[dtype])


def _problem(name: str, found: Tensor, expected: Tensor, limit: float) -> list[str]:
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))
    return [] if error <= limit else [f"{name}: relative error {error:.2g}, allowed {limit:.2g}"]
