"""Sets the logits of tokens that are not allowed to minus infinity, by a bit for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .reference import mask

_COMPILED_ARGUMENTS = (ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, COUNT, COUNT)


def mask_tokens_(logits: Tensor, allowed: Tensor, rows: Sequence[int] | None = None) -> None:
    """Mask `logits` [num_rows, vocab_size] in place.

    `allowed`: int32 [num_masks, num_words], bit `i % 32` of word `i // 32` for token `i`, on the device of the logits;
    bits beyond the vocabulary are ignored. `rows`: row of each mask, each once (None: all rows in order).
    """
    rows = range(len(logits)) if rows is None else rows
    is_served = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("mask_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        mask(logits, allowed, rows)
        return
    allowed, places = allowed.contiguous(), np.array(rows, np.int64)
    masks = allowed.data_ptr(), allowed.shape[1], places.ctypes.data, len(places)
    compiled(logits.data_ptr(), logits.stride(0), *masks, logits.shape[1])
