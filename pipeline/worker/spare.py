"""Starts a spare engine process in a worker of an embedded cluster, which preloads this module (`dask_setup`).

The job's plugin finds it (`plugin.engines_of`).
"""

from __future__ import annotations

import dask
from distributed import Worker

from ..cluster.worker_process import SPARE_THREADS
from ..supervisor.spare import SpareEngine

SPARE_EXTENSION = "lorabatch-spare-engine"


def dask_setup(worker: Worker) -> None:
    """Start the spare process. Dask calls this while the worker starts, after it has been given its GPU."""
    num_threads = int(dask.config.get(SPARE_THREADS))
    worker.extensions[SPARE_EXTENSION] = SpareEngine(worker.local_directory, num_threads)
