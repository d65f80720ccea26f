"""Dask clusters that grow and shrink with the backlog of our jobs: `cluster.adapt(Adaptive=JobAdaptive, …)`."""

from __future__ import annotations

import logging
from typing import Any

from distributed.deploy.adaptive import Adaptive

from ..scheduler.scaling import ScalingSettings, wanted_workers
from .hub import BACKLOG_OP

logger = logging.getLogger(__name__)


class JobAdaptive(Adaptive):
    """As many workers as the rows left are worth, between `minimum` and `maximum`.

    The scheduler's hub knows the rows and protects workers whose engines have some.
    """

    def __init__(self, *args: Any, scaling: ScalingSettings | None = None, **options: Any) -> None:
        self._scaling = scaling or ScalingSettings()
        super().__init__(*args, **options)

    async def target(self) -> int:
        """Workers wanted now. Without a hub, no job has come yet."""
        try:
            backlog = await getattr(self.scheduler, BACKLOG_OP)()
        except OSError as error:
            logger.warning("the scheduler does not tell its backlog: %s", error)
            return len(self.plan)
        if not isinstance(backlog, dict):
            return 0
        return wanted_workers(backlog["rows_left"], backlog["batch_rows"], backlog["num_jobs"], self._scaling)
