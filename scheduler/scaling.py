"""How many workers a backlog is worth, for clusters that grow and shrink."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """`batches_per_worker`: full batches of unfinished rows that justify a worker: fewer are done before it is up."""

    batches_per_worker: float = 4.0


def wanted_workers(rows_left: int, batch_rows: int, num_jobs: int, settings: ScalingSettings) -> int:
    """Workers for so many unfinished rows. Any job needs one, to be coordinated; none needs more than it has rows."""
    if num_jobs == 0:
        return 0
    rows_per_worker = max(1.0, batch_rows * settings.batches_per_worker)
    return max(1, -int(-rows_left // rows_per_worker))
