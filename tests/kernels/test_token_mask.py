"""Masks by bits: the compiled kernel and its plain twin leave the same logits, at any vocabulary and stride."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.kernels.token_mask import mask_tokens_
from lorabatch.kernels.token_mask.reference import mask


@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 31, 32, 33, 320, 1000]),
    spare_words=st.integers(0, 2),
    stride=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_what_is_left_are_the_tokens_whose_bits_are_set(
    num_rows: int, vocab_size: int, spare_words: int, stride: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(num_rows, vocab_size + stride, generator=generator)
    num_words = -(-vocab_size // 32) + spare_words
    allowed = torch.randint(-(2**31), 2**31, (num_rows, num_words), generator=generator).to(torch.int32)
    allowed[:, seed % num_words] = -1
    expected, found = memory.clone(), memory.clone()
    for row in range(num_rows):
        for token in range(vocab_size):
            if not int(allowed[row, token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    mask_tokens_(found[:, :vocab_size], allowed)
    assert torch.equal(found, expected), "also what lies behind the vocabulary"
    by_twin = memory.to(torch.float64)
    mask(by_twin[:, :vocab_size], allowed, range(num_rows))
    assert torch.equal(by_twin.float(), expected)


@given(num_rows=st.integers(1, 6), seed=st.integers(0, 2**32), data=st.data())
@settings(deadline=None)
def test_masks_are_for_the_rows_that_are_named(num_rows: int, seed: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True))
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(num_rows, 90, generator=generator)
    allowed = torch.randint(-(2**31), 2**31, (len(rows), 3), generator=generator).to(torch.int32)
    expected = memory.clone()
    for number, row in enumerate(rows):
        mask_tokens_(expected[row : row + 1, :70], allowed[number : number + 1])
    for found in (memory.clone(), memory.double()):
        mask_tokens_(found[:, :70], allowed, rows)
        assert torch.equal(found.float(), expected)
