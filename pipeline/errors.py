"""What can go wrong while shards run.

    JobFailedError (of jobs)
    ├── EngineFailedError       a worker's engine cannot be started, or keeps dying
    └── ShardAbandonedError     the worker gave the shard up (it stops, or was told to); others go on with it

All of them survive pickling: they travel from workers to the client.
"""

from __future__ import annotations

from ..jobs.errors import JobFailedError


class EngineFailedError(JobFailedError):
    """A worker's engine cannot be started, or keeps dying."""


class ShardAbandonedError(JobFailedError):
    """The worker stopped before the shard was done; its finished rows are kept."""
