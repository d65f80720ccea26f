"""The layout of keys and values in a page of the pool.

A page holds `[num_layers, 2 (key, value), num_kv_heads, page_tokens, head_dim]`; slot = page * page_tokens + place in
the page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Heads of a layer and its place in a page."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    page_tokens: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_elements(self) -> int:
        """Numbers in a page."""
        return self.num_layers * 2 * self.num_kv_heads * self.page_tokens * self.head_dim
