"""Changes logits of tokens that occur in prompt or completion: applies `repetition_penalty` r, then `frequency_penalty`
f and `presence_penalty` p.

    z[t] <- z[t] / r if z[t] > 0 else z[t] * r      for each token t of prompt or completion
    z[t] <- z[t] - f * n - p                        for each token t that the completion has n > 0 times
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .reference import penalise
from .types import PenalisedRow

__all__ = ["PenalisedRow", "penalise_tokens_"]

_COMPILED_ARGUMENTS = (ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)


def penalise_tokens_(logits: Tensor, rows: Sequence[PenalisedRow]) -> None:
    """Penalise `logits` [num_rows, vocab_size] in place. Each of `rows` has a place of its own; tokens beyond the
    vocabulary are ignored.
    """
    is_served = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("penalise_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None or not rows:
        penalise(logits, rows)
        return
    places, prompts, generated, *penalties = zip(*rows, strict=True)
    prompt_ends, generated_ends = (np.cumsum([0, *map(len, column)]) for column in (prompts, generated))
    arrays = (
        np.concatenate(prompts),
        prompt_ends,
        np.fromiter(chain.from_iterable(generated), np.int64, generated_ends[-1]),
        generated_ends,
        np.array(penalties, np.float64).T.copy(),
    )
    numbers = np.array(places, np.int64)
    first = logits.data_ptr(), logits.stride(0), logits.shape[1], numbers.ctypes.data, len(numbers)
    compiled(*first, *(array.ctypes.data for array in arrays))
