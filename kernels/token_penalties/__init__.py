"""Changes logits of tokens that occur in prompt or completion: applies `repetition_penalty`, then `frequency_penalty`
and `presence_penalty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..launch import to_device
from ..native import ADDRESS, COUNT, native_function

_COMPILED_ARGUMENTS = (ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)


class PenalisedRow(NamedTuple):
    """The tokens and penalties of one row of logits."""

    #: Row of the logits.
    place: int
    #: Tokens of the prompt, each once, ascending, int64.
    prompt: NDArray[np.int64]
    #: Tokens of the completion so far, in order.
    generated: Sequence[int]
    #: Divides positive logits, and multiplies negative ones, of tokens in prompt and completion; 1: off.
    repetition: float = 1.0
    #: Subtracted from a token's logit for each time that it was generated.
    frequency: float = 0.0
    #: Subtracted once from the logit of a generated token.
    presence: float = 0.0


def penalise_tokens_(logits: Tensor, rows: Sequence[PenalisedRow]) -> None:
    """Penalise `logits` [num_rows, vocab_size] in place. Each of `rows` has a place of its own; tokens beyond the
    vocabulary are ignored.
    """
    is_served = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("penalise_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None or not rows:
        for row in rows:
            penalise_row_by_torch_(logits[row.place], row)
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


def penalise_row_by_torch_(logits: Tensor, row: PenalisedRow) -> None:
    """`penalise_tokens_` of one row, `logits` [vocab_size], for every device and dtype."""

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
