"""Transposition changes places and widths, never values."""

from __future__ import annotations

import pytest
import torch

from lorabatch.kernels.transpose import transpose_into_


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (16, 3), (37, 50)], ids=str)
def test_every_number_arrives_in_its_place_and_no_other_is_touched(stored: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * 10.0 ** torch.randint(-7, 4, shape)).to(stored)
    wide = torch.full((shape[1], shape[0] + 9), torch.nan)
    transpose_into_(wide[:, 4 : 4 + shape[0]], x)
    assert wide[:, 4 : 4 + shape[0]].equal(x.t().float())
    assert wide[:, :4].isnan().all()
    assert wide[:, 4 + shape[0] :].isnan().all()


def test_other_types_and_layouts_are_served_by_torch() -> None:
    x = torch.randn(5, 7)
    narrow = torch.empty(7, 5, dtype=torch.bfloat16)
    transpose_into_(narrow, x)
    assert narrow.equal(x.t().bfloat16())
    turned = torch.empty(5, 7).t()
    transpose_into_(turned, x)
    assert turned.equal(x.t())


def test_a_matrix_that_does_not_fit_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        transpose_into_(torch.empty(7, 5), torch.empty(7, 5))
