"""How the scheduler decides: limits and, where they are wanted, lending and adapter traffic."""

from __future__ import annotations

from dataclasses import dataclass

from .adapter_traffic import TrafficSettings
from .tail import TailSettings


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`open_batches`: full batches of unfinished rows kept open per replica, so that no batch drains at a
    shard's end. `max_failures`, `max_losses`: attempts of one shard that may fail, or die with their
    replica, before the job fails. `learn_rows`: finished rows of an adapter from which its predicted length is
    corrected. `expected_replicas`: replicas still to join count as present when a short job is shared out. `tail`:
    when to lend running rows to idle replicas (None: never). `traffic`: adapters' bytes, to load them before their
    rows need them (None: replicas look after their adapters themselves).
    """

    open_batches: float = 2.0
    max_failures: int = 4
    max_losses: int = 8
    learn_rows: int = 8
    expected_replicas: int = 1
    tail: TailSettings | None = None
    traffic: TrafficSettings | None = None
