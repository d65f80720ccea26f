"""The gated activation against its definition in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lorabatch.kernels.gated import silu_gate, silu_gate_by_torch


@pytest.mark.parametrize("form", [silu_gate, silu_gate_by_torch])
@pytest.mark.parametrize("inner", [3, 16, 100])
def test_each_gate_opens_its_own_feature(form: Callable[[torch.Tensor], torch.Tensor], inner: int) -> None:
    packed = torch.randn(7, 2 * inner) * 10
    packed[0, :3] = torch.tensor([0.0, -200.0, 200.0])
    gate, up = packed.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert ((form(packed).double() - expected).abs() <= 1e-6 * expected.abs() + 1e-12).all()


def test_bfloat16_is_served_by_torch() -> None:
    packed = torch.randn(2, 32).bfloat16()
    assert torch.equal(silu_gate(packed), silu_gate_by_torch(packed))
