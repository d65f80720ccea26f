"""The sampling options of rows of logits, and the weight of a logit in a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Limits of temperatures. Beyond them a draw is the same to the last bit: among the largest logits alone, or among all
# alike. Between them, quotients of fp32 logits stay numbers.
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-30, 1e30
# Stands for no token in tensors and arrays of tokens, when the logits choose none: NaN or infinity among them, or
# nothing left to choose. Steps that are read have None instead.
NO_TOKEN = -1
LOG2_E = 1.4426950408889634
# Coefficients of f^5 to f^1 in a polynomial for 2^f, f from 0 to 1; the coefficient of f^0 is 1. Its relative error in
# fp32 is at most 1.7e-7.
POWERS_OF_2 = (
    0.0018671301659196615,
    0.009017029777169228,
    0.05579991266131401,
    0.24016444385051727,
    0.6931512951850891,
)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling options of each row, as tensors of length num_rows on the device of the logits."""

    #: Temperature, fp32: 0 for argmax, else from `SMALLEST_TEMPERATURE` to `LARGEST_TEMPERATURE`.
    temperature: Tensor
    #: Most tokens that are kept, int32; 0: off.
    top_k: Tensor
    #: Share of the weight that is kept, fp64; 1: off.
    top_p: Tensor
    #: First key of the row's uniform number, int64 read as 64 bits without a sign.
    seeds: Tensor
    #: Second key of the row's uniform number, in the form of `seeds`.
    streams: Tensor
    #: Third key of the row's uniform number, in the form of `seeds`.
    positions: Tensor


class Choices(NamedTuple):
    """The sampling options of each choice on a CPU, as arrays [num_choices]."""

    #: Row of the logits, int64.
    places: NDArray[np.int64]
    #: Temperature, fp64; 0 for the largest logit.
    temperature: NDArray[np.float64]
    #: Most tokens that are kept, int64; 0: off.
    top_k: NDArray[np.int64]
    #: Share of the weight that is kept, fp64; 1: off.
    top_p: NDArray[np.float64]
    #: Uniform number in [0, 1), fp64; not read at temperature 0.
    uniforms: NDArray[np.float64]


def weights_of(logits: Tensor, largest: float, temperature: float) -> Tensor:
    """`2^44 exp((logit - largest) / temperature)` as whole numbers, int64 of the shape of `logits`; 0 for NaN.

    Whole numbers have the same sum in any order. All operations are in fp32 and rounded one by one, so that every
    implementation has the same bits.
    """
    slope = np.float32(LOG2_E) / np.float32(min(max(temperature, SMALLEST_TEMPERATURE), LARGEST_TEMPERATURE))
    exponent = (logits.float() - largest) * float(slope)
    exponent = torch.where(exponent > -48, exponent, -48.0)
    whole = (exponent - 0.5 + 12582912.0) - 12582912.0  # 1.5 * 2^23 rounds to whole numbers
    fraction = exponent - whole
    power = torch.full_like(fraction, POWERS_OF_2[0])
    for coefficient in (*POWERS_OF_2[1:], 1.0):
        power = power * fraction + coefficient
    # a fraction of 2^23 from its bits, which has 1 where the exponent is that of 1
    mantissa = power.view(torch.int32).long() - 0x3F000000
    return (mantissa << 21) >> -whole.long()


def share_of(total: int, share: float) -> int:
    """`share`, at most 1, times `total`, cut to a whole number."""
    return min(int(float(total) * share), total)
