"""What the index of a whole job comes to, added up chunk by chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .index import ChunkSummary


@dataclass(slots=True)
class IndexTotals:
    """`rows_per_adapter`: "" counts the base model's rows. `damages`: chunk -> why it cannot be read."""

    num_chunks: int = 0
    num_rows: int = 0
    rows_per_adapter: Counter[str] = field(default_factory=Counter)
    damages: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, summaries: Iterable[ChunkSummary]) -> IndexTotals:
        """Of these chunks, in any order."""
        totals = cls()
        for summary in summaries:
            totals.add(summary)
        return totals

    def add(self, summary: ChunkSummary) -> None:
        """One chunk more, each once."""
        self.num_chunks += 1
        self.num_rows += summary.num_rows
        self.rows_per_adapter.update(summary.rows_per_adapter)
        if summary.damage is not None:
            self.damages[summary.chunk_id] = summary.damage
