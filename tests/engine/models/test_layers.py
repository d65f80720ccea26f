from __future__ import annotations

import pytest
import torch

from lorabatch.engine.models.layers import Linear
from lorabatch.kernels.packed_weight import can_multiply, pack


@pytest.mark.skipif(not can_multiply("float32"), reason="this build of torch packs no weights")
def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(9, 64, generator=generator)
    layer = Linear(pack(weight, "float32"), torch.randn(96, generator=generator), "float32")
    together = layer(x)
    assert torch.allclose(together, x @ weight.T + layer.pristine_bias, atol=1e-4)
    for num_rows in range(9):
        assert torch.equal(layer(x[:num_rows]), together[:num_rows]), f"{num_rows} rows"
