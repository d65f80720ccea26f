"""Batch-invariant products against the plain twin, and bit for bit in every launch shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from lorabatch.kernels.invariant_linear import invariant_linear
from lorabatch.kernels.invariant_linear.reference import multiply_rows
from lorabatch.kernels.invariant_linear.splits import split_features_of

pytestmark = pytest.mark.usefixtures("products_in_order")
# Out and in features: of one split; of two, with a rest of both; smaller than a tile, and not aligned.
SHAPES = [(200, 64), (70, 1100), (33, 30)]
SHORT = {(torch.float32, SHAPES[1]), (torch.bfloat16, SHAPES[0]), (torch.float16, SHAPES[2])}
CASES = [
    pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.long])
    for case in product((torch.float32, torch.float16, torch.bfloat16), SHAPES)
]


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_rows_have_the_same_bits_in_every_launch_shape(
    assert_close: Callable[[Tensor, Tensor], None],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    """Tiles of 64 and 128 rows, partly filled; splits in planes, and added by the program that computed them."""
    out_features, in_features = shape
    x = numbers(300, in_features, dtype=dtype, device=device)
    weight = numbers(out_features, in_features, dtype=dtype, device=device, seed=1)
    bias = numbers(out_features, dtype=dtype, device=device, seed=2)
    whole = invariant_linear(x, weight, bias)
    expected = torch.empty_like(whole)
    multiply_rows(expected, x, weight, bias)
    assert_close(whole, expected)
    for num_rows in (1, 15, 64, 65, 129):
        last = slice(300 - num_rows, 300)
        assert torch.equal(invariant_linear(x[last].clone(), weight, bias), whole[last]), num_rows
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    assert torch.equal(invariant_linear(x[order], weight, bias), whole[order])
    assert not len(invariant_linear(x[:0], weight, bias))


def test_what_is_behind_the_last_row_or_feature_is_not_read(device: torch.device) -> None:
    rows = torch.full((4, 40), torch.nan, device=device)
    weight = torch.full((20, 40), torch.nan, device=device)
    rows[:2], weight[:17] = (
        numbers(2, 40, dtype=rows.dtype, device=device),
        numbers(17, 40, dtype=rows.dtype, device=device),
    )
    found = invariant_linear(rows[:2], weight[:17])
    torch.testing.assert_close(found, rows[:2] @ weight[:17].T)


@pytest.mark.parametrize(
    ("out_features", "in_features", "num_splits"),
    [(6144, 4096, 1), (4096, 4096, 2), (4096, 14336, 2), (2048, 8192, 4), (512, 2048, 4), (96, 64, 1), (64, 16384, 8)],
)
def test_splits_follow_from_the_shape_of_the_weight(out_features: int, in_features: int, num_splits: int) -> None:
    split = split_features_of(torch.Size((out_features, in_features)), torch.bfloat16)
    assert split % 64 == 0
    assert -(-in_features // split) == num_splits
