"""The plain twin of `log_sum_exp`."""

from __future__ import annotations

from torch import Tensor


def sum_rows(out: Tensor, x: Tensor) -> None:
    """Write `log(sum(exp(x)))` of each row of `x` to `out` [num_rows], in fp64."""
    out.copy_(x.double().logsumexp(-1))
