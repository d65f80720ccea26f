"""Parameters of a layer of the gated delta rule, and the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """Parameters of one layer, in fp32."""

    #: Weights of the convolution, [taps, channels]; the last are those of the present token.
    conv: Tensor
    #: Logarithm of each head's rate of forgetting, [value_heads] (`A_log`).
    decay_log: Tensor
    #: Bias of the steps of forgetting, [value_heads] (`dt_bias`).
    step_bias: Tensor
    #: Weight of the norm of a value head, [value_size].
    norm: Tensor
    #: Number that the norm adds to the mean square.
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of a step, whose tokens lie one behind the other."""

    #: First token of each row, and the end of the last, int64 `[num_rows + 1]`.
    first_tokens: Tensor
    #: Place of what each row keeps, in fp32 numbers, int64 `[num_rows]`.
    places: Tensor
    #: Whether the row begins, so that what is at its place is not read, bool `[num_rows]`.
    is_new: Tensor
