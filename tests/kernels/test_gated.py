"""The gated activation and its plain twin against the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.gated import silu_gate
from lorabatch.kernels.gated.reference import gate


@pytest.mark.parametrize("form", [silu_gate, gate])
@pytest.mark.parametrize("inner", [3, 16, 100])
def test_each_gate_opens_its_own_feature(form: Callable[[torch.Tensor], torch.Tensor], inner: int) -> None:
    packed = torch.randn(7, 2 * inner) * 10
    packed[0, :3] = torch.tensor([0.0, -200.0, 200.0])
    gated, up = packed.double().chunk(2, dim=-1)
    expected = gated / (1 + torch.exp(-gated)) * up
    assert ((form(packed).double() - expected).abs() <= 1e-6 * expected.abs() + 1e-12).all()


def test_bfloat16_is_served_by_the_plain_twin() -> None:
    packed = torch.randn(2, 32).bfloat16()
    assert torch.equal(silu_gate(packed), gate(packed))
