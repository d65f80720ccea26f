"""Products with weights in blocks have the bits of products with the same numbers in fp32."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lorabatch.kernels.packed_weight.blocks import Blocks, BlockWeight
from lorabatch.kernels.packed_weight.panels import PanelWeight, has_panels

pytestmark = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")


def random_blocks(
    out_features: int, in_features: int, *, bits: int, size: int, has_shifts: bool, in_fp16: bool
) -> Blocks:
    random = torch.Generator().manual_seed(out_features + bits + size)

    def factors() -> torch.Tensor:
        # 17 bits, as those of the K kinds
        steps = torch.randint(-(2**16), 2**16, (out_features, in_features // size), generator=random) * 2.0**-20
        return steps.half().float() if in_fp16 else steps

    codes = torch.randint(0, 2**bits, (out_features, in_features), generator=random).to(torch.uint8)
    return Blocks(codes, factors(), factors() if has_shifts else None, bits)


@pytest.mark.parametrize(
    ("bits", "size", "has_shifts", "in_fp16"), list(product((4, 8), (16, 32), (False, True), (False, True)))
)
# columns: less than a vector, parts of panels, several panels; depth: one block, one part and more than one
@pytest.mark.parametrize("shape", [(1, 32), (7, 64), (24, 96), (37, 160), (96, 64), (45, 2112)], ids=str)
def test_products_have_the_bits_of_the_plain_weight(
    shape: tuple[int, int], bits: int, size: int, has_shifts: bool, in_fp16: bool
) -> None:
    blocks = random_blocks(*shape, bits=bits, size=size, has_shifts=has_shifts, in_fp16=in_fp16)
    packed, plain = BlockWeight(blocks), PanelWeight(blocks.dense())
    assert packed.dense().equal(blocks.dense())
    bias = torch.randn(shape[0])
    for num_rows in (0, 1, 2, 3, 5, 6, 7, 12, 13, 40):
        x = torch.randn(num_rows, shape[1])
        for shift in (None, bias):
            assert packed.multiply(x, shift).equal(plain.multiply(x, shift)), num_rows


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_read_again_from_a_copy(bits: int) -> None:
    packed = BlockWeight(random_blocks(37, 64, bits=bits, size=32, has_shifts=False, in_fp16=True))
    again = BlockWeight.of_numbers(packed.numbers.clone(), packed.shape)
    assert again.dense().equal(packed.dense())
