"""How each row of logits is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Beyond these the draw is the same to the last bit: among the largest alone, or among all alike. Quotients of fp32
# logits stay numbers between them.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30
# In place of a token where the logits choose none: NaN or infinity among them, or nothing left to choose.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled, tensors of length num_rows on the device of the logits.

    `temperature` fp32 (0: argmax; else from `SMALLEST_TEMPERATURE` to `LARGEST_TEMPERATURE`),
    `top_k` int32 (0: off), `top_p` fp64 (1: off); `seeds`, `streams`, `positions` int64, read as 64 bits without a
    sign.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    streams: Tensor
    positions: Tensor


class Choices(NamedTuple):
    """How tokens are chosen on a CPU, arrays [num_rows].

    `places`: int64, rows of the logits. `temperature`: fp64, 0 for the largest logit. `top_k`: int64, 0 is off.
    `top_p`: fp64, 1 is off. `uniforms`: fp64 in [0, 1), not read at temperature 0.
    """

    places: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]
