"""Makes logits of tokens that are not allowed minus infinity, by a bit for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function

_COMPILED_ARGUMENTS = (ADDRESS, COUNT, ADDRESS, COUNT, COUNT, COUNT)


def mask_tokens_(logits: Tensor, allowed: Tensor, rows: Sequence[int] | None = None) -> None:
    """`logits`: [num_rows, vocab_size]; `allowed`: [num_masks, num_words] int32, bit `i % 32` of word `i // 32` for
    token `i`, on the device of the logits. Bits beyond the vocabulary say nothing. `rows`: of each mask (None: all in
    their order).
    """
    is_served = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("mask_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        for number, row in enumerate(range(len(logits)) if rows is None else rows):
            mask_tokens_by_torch_(logits[row : row + 1], allowed[number : number + 1])
        return
    allowed = allowed.contiguous()
    (num_rows, vocab_size), num_words = logits.shape, allowed.shape[1]
    if rows is None:
        compiled(logits.data_ptr(), logits.stride(0), allowed.data_ptr(), num_words, num_rows, vocab_size)
        return
    # a view for each row would take longer than its mask
    first, row_bytes = logits.data_ptr(), logits.stride(0) * logits.element_size()
    mask, mask_bytes = allowed.data_ptr(), num_words * allowed.element_size()
    for number, row in enumerate(rows):
        compiled(first + row * row_bytes, 0, mask + number * mask_bytes, num_words, 1, vocab_size)


def mask_tokens_by_torch_(logits: Tensor, allowed: Tensor) -> None:
    """`mask_tokens_` for every device and dtype. A row after the other: the bits of all as numbers would be large."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(logits, allowed, strict=True):
        is_forbidden = ((words[:, None] >> places) & 1) == 0
        row.masked_fill_(is_forbidden.flatten()[: len(row)], -torch.inf)
