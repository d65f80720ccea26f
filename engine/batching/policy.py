"""Chooses the batcher of an engine for each mode that a job can ask for. No torch: plans ask it too."""

from __future__ import annotations

from collections.abc import Callable

from ...scheduler.batching import (
    Batcher,
    ClusteredBatcher,
    CostBatcher,
    InClusters,
    MergeWaveBatcher,
    Ranks,
    no_more_rows,
)
from ...scheduler.cost import CostModel
from ..config import EngineConfig

# Merging re-packs every targeted weight, about a second for 135M parameters on two cores, and saves about a
# tenth of each step: four full batches are where it starts to pay.
_WAVE_BATCHES = 4


def choose_batcher(
    config: EngineConfig,
    must_merge: Callable[[int], bool],
    cost: CostModel,
    ranks: Ranks,
    mean_output_tokens: Callable[[], float],
    rows_to_come: Callable[[int], int] = no_more_rows,
) -> Batcher:
    """The batcher of the configured mode.

    `unmerged` and `exact` merge only what is exact no other way; `merged` merges every adapter, one after the other;
    `auto` decides as `config.auto_policy` says. What must be merged has waves of its own in every mode.
    """
    min_rows = None
    inner: Batcher = ClusteredBatcher()
    if config.mode == "merged":
        min_rows = 1
    elif config.mode == "auto":
        match config.auto_policy:
            case "cost":
                inner = InClusters(CostBatcher(cost, ranks, mean_output_tokens, rows_to_come))
            case "dlora":
                # A policy of a paper: loaded only when it is asked for.
                from ...scheduler.baselines.dlora_batching import DloraBatcher

                inner = DloraBatcher(cost, ranks, config.batch_rows)
            case "waves":
                min_rows = _WAVE_BATCHES * config.batch_rows
    return MergeWaveBatcher(inner, must_merge, min_rows)
