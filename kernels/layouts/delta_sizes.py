"""`DeltaSizes`: sizes of a layer of the gated delta rule. No torch here: plans ask them too."""

from __future__ import annotations

from dataclasses import dataclass


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
    def num_keys(self) -> int:
        """Features of all queries, and of all keys."""
        return self.key_heads * self.key_size

    @property
    def num_values(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Features of all queries, keys and values: those that are convolved."""
        return 2 * self.num_keys + self.num_values

    @property
    def parts(self) -> tuple[int, ...]:
        """Features of a token: channels, a gate for each value, then for each value head how much it writes and how
        much it forgets."""
        return self.channels, self.num_values, self.value_heads, self.value_heads

    @property
    def projected(self) -> int:
        """Features of a token, all parts together."""
        return sum(self.parts)

    @property
    def window_elements(self) -> int:
        """Numbers of a row's latest inputs of the convolution, [taps - 1, channels]."""
        return (self.taps - 1) * self.channels

    @property
    def state_elements(self) -> int:
        """Numbers that a row keeps: the window, then states [value_heads, key_size, value_size]."""
        return self.window_elements + self.num_values * self.key_size
