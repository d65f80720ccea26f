"""Sizes and parameters of a layer of the gated delta rule, and the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of one layer. Consecutive value heads share a query and a key head."""

    #: Heads of queries, and of keys.
    key_heads: int
    #: Heads of values; a multiple of `key_heads`.
    value_heads: int
    #: Features of a query or key head.
    key_size: int
    #: Features of a value head.
    value_size: int
    #: Tokens that the convolution sees, the present one included.
    taps: int

    @property
    def num_values(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Features of all queries, keys and values: those that are convolved."""
        return 2 * self.key_heads * self.key_size + self.num_values

    @property
    def projected(self) -> int:
        """Features of a token: channels, a gate for each value, then for each value head how much it writes and how
        much it forgets."""
        return self.channels + self.num_values + 2 * self.value_heads

    @property
    def window_elements(self) -> int:
        """Numbers of a row's latest inputs of the convolution, [taps - 1, channels]."""
        return (self.taps - 1) * self.channels

    @property
    def state_elements(self) -> int:
        """Numbers that a row keeps: the window, then states [value_heads, key_size, value_size]."""
        return self.window_elements + self.num_values * self.key_size


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
