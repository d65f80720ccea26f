"""Logarithms of sums of exponentials against the plain twin, and bit for bit whatever rows are beside one."""

from __future__ import annotations

import pytest
import torch

from lorabatch.kernels.log_sum_exp import log_sum_exp
from lorabatch.kernels.log_sum_exp.reference import sum_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [1, 96, 9001])
def test_rows_are_summed_as_by_the_plain_twin_and_each_by_itself(
    device: torch.device, dtype: torch.dtype, num_columns: int
) -> None:
    x = (torch.randn(5, num_columns, generator=torch.Generator().manual_seed(0)) * 8).to(device, dtype)
    x[1, : num_columns // 2] = -torch.inf
    found = log_sum_exp(x)
    expected = torch.empty_like(found)
    sum_rows(expected, x)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-6)
    for row in range(5):
        assert torch.equal(log_sum_exp(x[row : row + 1].clone()), found[row : row + 1])


def test_rows_of_no_possible_token_are_minus_infinity(device: torch.device) -> None:
    assert log_sum_exp(torch.full((2, 40), -torch.inf, device=device)).tolist() == [-torch.inf] * 2
    assert not len(log_sum_exp(torch.zeros(0, 40, device=device)))
