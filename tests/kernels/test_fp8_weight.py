"""Linear layers in e4m3: against the plain twin's rounding, torch's own product, and plain numbers."""

from __future__ import annotations

import math

import pytest
import torch

from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.packed_weight.fp8 import Fp8Weight, quantize_rows
from lorabatch.kernels.packed_weight.reference import multiply, quantize


@pytest.mark.parametrize("num_columns", [16, 48, 1000])
def test_rows_become_what_torch_rounds_them_to(num_columns: int, device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(200)  # in fp16, numbers in the middle of two codes
    x = torch.randn(9, num_columns, device=device) * torch.logspace(-30, 8, 9, base=2, device=device)[:, None]
    x[0] = 0
    x[1, ::2] = 0
    x[2] *= torch.logspace(-12, 0, num_columns, base=2, device=device)  # down to subnormal numbers, and below them
    x = x.to(dtype)
    codes, scales = quantize_rows(x)
    expected_codes, expected_scales = quantize(x)
    assert scales.equal(expected_scales)
    assert codes.view(torch.uint8).bitwise_and(127).equal(expected_codes.view(torch.uint8).bitwise_and(127))
    assert (codes.float() == expected_codes.float()).all(), "signs, but for a zero's"


def test_every_number_in_the_middle_of_two_goes_to_the_even_one(device: torch.device) -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    x = torch.cat([middles, torch.tensor([448.0])])[None].to(device)
    codes, scales = quantize_rows(x)
    assert float(scales) == 1.0
    assert (codes.view(torch.uint8)[0, :-1].cpu() % 2 == 0).all()
    assert codes.float()[0, :-1].cpu().sub(middles).abs().le((every[1:] - every[:-1]) / 2).all()


def test_a_row_that_is_not_finite_stays_so_and_alone(device: torch.device) -> None:
    weight = Fp8Weight(torch.randn(32, 16, device=device))
    x = torch.randn(4, 16, device=device)
    good = weight.multiply(x.clone(), None)
    x[1, 3], x[2, 0] = math.nan, math.inf
    found = weight.multiply(x, None)
    assert found[[0, 3]].equal(good[[0, 3]])
    assert not found[[1, 2]].isfinite().any()


@pytest.mark.skipif(not is_interpreted(), reason="a GPU multiplies by torch's own operator")
def test_products_are_those_of_torch_s_own_operator() -> None:
    """On a CPU torch has it too; a GPU is given the same arguments."""
    x, w, bias = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
    weight = Fp8Weight(w)
    codes, scales = quantize_rows(x)
    product = torch._scaled_mm(codes, weight.codes.t(), scales, weight.scales.t(), out_dtype=torch.bfloat16)
    assert weight.multiply(x, bias).sub(product + bias).abs().max() <= 0.04 * product.abs().max()
    plain = multiply(w, x, None)
    assert (weight.multiply(x, None).double() - plain).norm() < 0.06 * plain.norm()
    assert weight.dense().sub(w.float()).norm() < 0.04 * w.float().norm()
