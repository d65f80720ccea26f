"""The plain twin of `mask_tokens_`, for every device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mask(logits: Tensor, allowed: Tensor, rows: Sequence[int]) -> None:
    """Mask `rows` of `logits` in place, one after the other: unpacked bits of all rows would be large."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(rows, allowed, strict=True):
        is_forbidden = ((words[:, None] >> places) & 1) == 0
        logits[row].masked_fill_(is_forbidden.flatten()[: logits.shape[1]], -torch.inf)
