"""Makes logits of tokens that are not allowed minus infinity, by a bit for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function

_COMPILED_ARGUMENTS = (ADDRESS, COUNT, ADDRESS, COUNT, COUNT, COUNT)


def mask_tokens_(logits: Tensor, allowed: Tensor) -> None:
    """`logits`: [num_rows, vocab_size]; `allowed`: [num_rows, num_words] int32, bit `i % 32` of word `i // 32` for
    token `i`, on the device of the logits. Bits beyond the vocabulary say nothing.
    """
    is_served = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("mask_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        mask_tokens_by_torch_(logits, allowed)
        return
    allowed = allowed.contiguous()
    compiled(logits.data_ptr(), logits.stride(0), allowed.data_ptr(), allowed.shape[1], *logits.shape)


def mask_tokens_by_torch_(logits: Tensor, allowed: Tensor) -> None:
    """`mask_tokens_` for every device and dtype. A row after the other: the bits of all as numbers would be large."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(logits, allowed, strict=True):
        is_forbidden = ((words[:, None] >> places) & 1) == 0
        row.masked_fill_(is_forbidden.flatten()[: len(row)], -torch.inf)
