"""The layout of keys and values in a page of the pool, for all that read the pool by pages.

A page holds `[num_layers, 2 (key, value), num_kv_heads, page_tokens, head_dim]`; slot = page * page_tokens + place in
the page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The heads of each layer, and the tokens of a page of keys and values."""

    #: Query heads of a layer.
    num_heads: int
    #: Key heads of a layer, and value heads.
    num_kv_heads: int
    #: Features of a head.
    head_dim: int
    #: Layers of the model.
    num_layers: int
    #: Tokens of a page.
    page_tokens: int

    @property
    def queries_per_key_head(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_elements(self) -> int:
        """Numbers in a page."""
        return self.num_layers * 2 * self.num_kv_heads * self.page_tokens * self.head_dim

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def pages_for_elements(self, num_elements: int) -> int:
        """Pages that hold `num_elements` numbers."""
        return -(-num_elements // self.page_elements)
