"""Logarithm of the sum of exponentials of each row, `log(sum(exp(x)))` over the last dimension, from which
log-probabilities are computed. A row's bits depend on that row alone, which torch's reductions do not promise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_sum_exp(x: Tensor) -> Tensor:
    """The logarithm of each row's sum of exponentials, fp32 [num_rows]; `x` [num_rows, num_columns] is contiguous."""
    assert x.is_contiguous(), "x must be contiguous"
    out = torch.empty(len(x), dtype=torch.float32, device=x.device)
    from .triton import sum_rows

    if len(x):
        sum_rows(out, x)
    return out
