"""Chooses the batcher of an engine for each mode that a job can ask for. No torch: plans ask it too."""

from __future__ import annotations

from ...scheduler.batching import Batcher, ClusteredBatcher, MergeWaveBatcher, ReplicaFacts, batcher_of
from ..config import EngineConfig


def choose_batcher(config: EngineConfig, facts: ReplicaFacts) -> Batcher:
    """The batcher of the configured mode.

    `unmerged` and `exact` merge only what is exact no other way; `merged` merges every adapter, one after the other;
    `auto` decides as `config.auto_policy` says. What must be merged has waves of its own in every mode.
    """
    if config.mode == "auto":
        return batcher_of(config.auto_policy, facts)
    return MergeWaveBatcher(ClusteredBatcher(), facts.must_merge, 1 if config.mode == "merged" else None)
