"""The layout of what rows keep in pages of the pool, for all that read the pool by pages.

Layers whose key heads have one shape form a group: their keys and values are stored one behind the other. A page of a
model with one group holds `[num_layers, 2 (key, value), num_kv_heads, page_tokens, head_dim]`; slot = page *
page_tokens + place in the page. Further groups follow. What a row keeps besides, whatever its length, is in pages
behind those of its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of the keys (and values) of a token in one layer."""

    #: Key heads of a layer, and value heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int


@dataclass(frozen=True)
class PageLayout:
    """The heads of each layer, and the tokens of a page of keys and values.

    The first fields are those of the first group of layers, which on GPUs is the only one.
    """

    #: Query heads of a layer.
    num_heads: int
    #: Key heads of a layer, and value heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Layers that store keys and values.
    num_layers: int
    #: Tokens of a page.
    page_tokens: int
    #: Shapes of heads in further groups, and the number of layers of each.
    others: tuple[tuple[HeadShape, int], ...] = ()
    #: Pages of a row behind those of its tokens.
    row_pages: int = 0

    @property
    def queries_per_key_head(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def groups(self) -> tuple[tuple[HeadShape, int], ...]:
        """Shapes of heads, and the number of layers of each, in the order in which they are stored."""
        return ((HeadShape(self.num_kv_heads, self.head_dim), self.num_layers), *self.others)

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """Numbers of a token before each group, and at the end those of all groups. All are multiples of each head's
        size, so that a head is a row of numbers of its size.
        """
        unit = math.lcm(*(shape.head_dim for shape, _ in self.groups))
        starts = [0]
        for shape, num_layers in self.groups:
            starts.append(starts[-1] + -(-2 * num_layers * shape.num_kv_heads * shape.head_dim // unit) * unit)
        return tuple(starts)

    @property
    def page_elements(self) -> int:
        """Numbers in a page."""
        return self.group_starts[-1] * self.page_tokens

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def pages_for_row(self, num_tokens: int) -> int:
        """Pages of a row of `num_tokens` tokens."""
        return self.pages_for_tokens(num_tokens) + self.row_pages

    def tokens_in(self, num_pages: int) -> int:
        """Tokens whose keys and values `num_pages` pages of one row hold."""
        return (num_pages - self.row_pages) * self.page_tokens

    def pages_for_elements(self, num_elements: int) -> int:
        """Pages that hold `num_elements` numbers."""
        return -(-num_elements // self.page_elements)
