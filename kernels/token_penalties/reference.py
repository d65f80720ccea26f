"""The plain twin of `penalise_tokens_`, for every device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..launch import to_device
from .types import PenalisedRow


def penalise(logits: Tensor, rows: Sequence[PenalisedRow]) -> None:
    """Penalise `logits` [num_rows, vocab_size] in place, one row after the other."""
    for row in rows:
        _penalise_row(logits[row.place], row)


def _penalise_row(logits: Tensor, row: PenalisedRow) -> None:
    def known(tokens: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(tokens[tokens < len(logits)]), logits.device)

    generated = np.array(row.generated, np.int64)
    if row.repetition != 1.0:
        seen = known(np.union1d(row.prompt, generated))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / row.repetition, values * row.repetition)
    if row.frequency or row.presence:
        tokens, counts = np.unique(generated, return_counts=True)
        penalties = (row.frequency * counts + row.presence)[tokens < len(logits)]
        logits[known(tokens)] -= to_device(torch.from_numpy(penalties), logits.device).to(logits.dtype)
