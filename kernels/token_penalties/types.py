"""The tokens and penalties of a row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
