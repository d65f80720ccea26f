"""Unmerged LoRA over segments against one token at a time in fp64."""

from __future__ import annotations

import pytest
import torch

from lorabatch.kernels.segment_lora import LoraMember, LoraSegment, LoraSiteWeights, add_lora_
from lorabatch.kernels.segment_lora.reference import add_lora_reference

IN, OUTS = 24, (16, 8, 8)


def site(ranks: tuple[int | None, ...], seed: int) -> LoraSiteWeights:
    """An adapter at a packed layer of three members; None leaves a member alone."""
    generator = torch.Generator().manual_seed(seed)
    members, stacked, row, column = [], [], 0, 0
    for rank, out in zip(ranks, OUTS, strict=True):
        if rank is not None:
            stacked.append(torch.randn(rank, IN, generator=generator))
            b = torch.randn(rank, out, generator=generator)
            members.append(LoraMember(row, row + rank, column, column + out, b, scaling=0.5 * (seed + 1)))
            row += rank
        column += out
    return LoraSiteWeights(torch.cat(stacked), tuple(members))


@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, None, 8), (20, 3, 64), (None, None, 5)])
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 5), (0, 4)])
def test_each_segment_gets_its_own_adapter(ranks: tuple[int | None, ...], sizes: tuple[int, ...]) -> None:
    start, segments = 2, []
    for seed, size in enumerate(sizes):
        segments.append(LoraSegment(start, start + size, site(ranks, seed)))
        start += size
    x, y = torch.randn(start + 1, IN), torch.randn(start + 1, sum(OUTS))
    expected = add_lora_reference(y, x, segments)
    before = y.clone()
    add_lora_(y, x, segments)
    assert (y.double() - expected).abs().max() < 1e-3
    assert torch.equal(y[:2], before[:2]), "rows without an adapter changed"
    assert torch.equal(y[-1], before[-1]), "rows without an adapter changed"


def test_an_adapter_that_leaves_the_layer_alone_changes_nothing() -> None:
    x, y = torch.randn(4, IN), torch.randn(4, sum(OUTS))
    before = y.clone()
    add_lora_(y, x, [LoraSegment(0, 4, None)])
    assert torch.equal(y, before)
