"""RMSNorm with and without the residual sum, against its plain twin and the form that CPUs use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.rms_norm import rms_norm
from lorabatch.kernels.rms_norm.fused import add_rms_norm
from lorabatch.kernels.rms_norm.reference import norm


@pytest.mark.parametrize("features", [16, 70])
@pytest.mark.parametrize("has_y", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_rows_are_normalised_after_the_residual_sum(
    assert_close: Callable[..., None],
    dtype: torch.dtype,
    device: torch.device,
    features: int,
    has_y: bool,
    num_rows: int,
) -> None:
    x = torch.randn(num_rows, features, device=device).to(dtype)
    y = torch.randn_like(x) if has_y else None
    weight = torch.randn(features, device=device).to(dtype)
    other = x.clone()
    expected = norm(other, y, weight, 1e-5, 1.0)
    assert_close(add_rms_norm(x, y, weight, 1e-5, 1.0), expected)
    assert_close(x, other)
    if not has_y:
        assert_close(add_rms_norm(x, None, weight, 1e-5), rms_norm(x, weight, 1e-5))
