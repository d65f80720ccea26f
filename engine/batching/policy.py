"""Chooses the batcher of an engine for each mode that a job can ask for. No torch: plans ask it too."""

from __future__ import annotations

from ...scheduler.batchers.batching import Batcher, MergeWaveBatcher, ReplicaFacts, batcher_of, clustered
from ...scheduler.batchers.cost_batching import PromptsTogether
from ..config import EngineConfig


def choose_batcher(config: EngineConfig, facts: ReplicaFacts) -> Batcher:
    """The configured batcher, or that of the mode.

    `unmerged` and `exact` merge only what is exact no other way; `merged` merges every adapter, one after the other;
    `auto` decides by cost. What must be merged has waves of its own in every mode. Prompts enter together where mixed
    steps cost more than others: on GPUs.
    """
    batcher: Batcher
    if config.batcher is not None or config.mode == "auto":
        batcher = batcher_of(config.batcher or "cost", facts)
    else:
        batcher = MergeWaveBatcher(clustered, facts.must_merge, 1 if config.mode == "merged" else None)
    return PromptsTogether(batcher, facts.cost, facts.ranks) if facts.cost.mixed_step_s else batcher
