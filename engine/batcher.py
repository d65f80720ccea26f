"""Which batcher an engine uses for each mode that a job can ask for."""

from __future__ import annotations

from collections.abc import Callable

from ..scheduler.batching import Batcher, ClusteredBatcher
from ..scheduler.merge_waves import MergeWaveBatcher
from .config import EngineConfig

# Merging re-packs every targeted weight, about a second for 135M parameters on two cores, and saves about a
# tenth of each step: four full batches are where it starts to pay.
_AUTO_MERGE_BATCHES = 4


def choose_batcher(config: EngineConfig, must_merge: Callable[[int], bool]) -> Batcher:
    """`unmerged` and `exact` merge only what is exact no other way; `merged` merges every adapter; `auto` merges an
    adapter whose waiting rows fill several batches."""
    min_rows = {
        "unmerged": None,
        "exact": None,
        "merged": 1,
        "auto": _AUTO_MERGE_BATCHES * config.max_batch_rows,
    }[config.mode]
    return MergeWaveBatcher(ClusteredBatcher(), must_merge, min_rows)
