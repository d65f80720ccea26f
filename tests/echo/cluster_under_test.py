"""Dask clusters whose processes a test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Client, LocalCluster


@contextmanager
def own_cluster(num_workers: int = 2) -> Iterator[Client]:
    """A cluster of real worker processes for one test alone."""
    cluster = LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    with cluster, Client(cluster, set_as_default=False) as client:
        yield client
