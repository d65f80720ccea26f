"""The largest numbers of many rows are those by sorting, equal ones in order of their places."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.sampling import largest_of_rows, reference

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 2, 37, 512, 4999, 50257]),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    decimals=st.sampled_from([0, 1, 6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_rows=st.sampled_from([0, 1, 3, 70]),
)
def test_they_are_those_by_sorting(
    seed: int, width: int, share: float, decimals: int, dtype: torch.dtype, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(num_rows, width + 3, generator=generator) * 3).round(decimals=decimals)
    values[:, ::5] = -torch.inf
    rows = values.to(dtype)[:, :width].to(DEVICE)  # rows with other numbers behind them
    count = max(1, round(share * min(width, 2000)))
    found, expected = largest_of_rows(rows, count), reference.largest_of_rows(rows, count)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.nan])
def test_a_row_of_one_number_gives_places_of_its_own(value: float) -> None:
    rows = torch.full((2, 9000), value, device=DEVICE)
    rows[1] = torch.arange(9000)
    _, places = largest_of_rows(rows, 64)
    assert len(set(places[0].tolist())) == 64
    assert places[1].tolist() == list(range(8999, 8935, -1))
    assert value != value or places[0].tolist() == list(range(64))
