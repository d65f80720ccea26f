"""The plain twin of `invariant_linear`."""

from __future__ import annotations

from torch import Tensor

from .splits import split_features_of


def multiply_rows(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write `x W^T + bias` to `out` [num_rows, out_features], one split after the other, in fp64."""
    split = split_features_of(weight.shape, x.dtype)
    total = out.new_zeros(out.shape, dtype=x.double().dtype)
    for first in range(0, x.shape[1], split):
        total += x[:, first : first + split].double() @ weight[:, first : first + split].double().T
    if bias is not None:
        total += bias
    out.copy_(total)
