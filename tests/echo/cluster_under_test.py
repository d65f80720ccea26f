"""Dask clusters whose processes a test may kill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
from distributed import Client, LocalCluster
from distributed.security import Security

Process = subprocess.Popen[bytes]
# Any free port: without an address Dask takes 8787, and warns when another process has it.
QUIETLY: dict[str, Any] = {
    "threads_per_worker": 1,
    "host": "127.0.0.1",
    "dashboard_address": "127.0.0.1:0",
    "scheduler_kwargs": {"dashboard": False},
}


@contextmanager
def own_cluster(num_workers: int = 2) -> Iterator[Client]:
    """A cluster of real worker processes for one test alone."""
    # A worker that is stopped is given up sooner than after Dask's five minutes. 15 s after a worker was lost, Dask
    # closes its nanny if no worker is there at that moment, also when one has just been lost again.
    settings = {"distributed.scheduler.worker-ttl": "15s", "distributed.deploy.lost-worker-timeout": "10m"}
    with dask.config.set(settings):
        cluster = LocalCluster(n_workers=num_workers, **QUIETLY)
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


@contextmanager
def existing_cluster(
    folder: Path, num_workers: int, scheduler_options: Sequence[str] = (), worker_options: Sequence[str] = ()
) -> Iterator[tuple[str, list[Process], Process]]:
    """A Dask scheduler and nannied workers as their own processes, with Dask's default settings."""
    address_file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    common = ["--scheduler-file", str(address_file), "--host", "127.0.0.1", "--no-dashboard"]
    scheduler = subprocess.Popen(
        [*dask, "scheduler", *common, "--port", "0", *scheduler_options],
        stderr=subprocess.DEVNULL,
    )
    workers = [
        subprocess.Popen(
            [*dask, "worker", *common, "--nthreads", "1", "--local-directory", str(folder), *worker_options],
            stderr=subprocess.DEVNULL,
        )
        for _ in range(num_workers)
    ]
    try:
        with Client(scheduler_file=str(address_file), set_as_default=False, timeout="300s") as client:
            client.wait_for_workers(num_workers, timeout=300)
            address = str(client.scheduler_info(n_workers=0)["address"])
        yield address, workers, scheduler
    finally:
        for process in [*workers, scheduler]:
            process.terminate()
        for process in [*workers, scheduler]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait(30)


def make_certificates(folder: Path) -> dict[str, str]:
    """A self-signed certificate and its key, as PEM files, by the names of the options."""
    made = Security.temporary()
    texts = {"tls_ca": made.tls_ca_file, "tls_cert": made.tls_client_cert, "tls_key": made.tls_client_key}
    for name, text in texts.items():
        (folder / f"{name}.pem").write_text(text)
    return {name: str(folder / f"{name}.pem") for name in texts}


def tls_words(certificates: dict[str, str]) -> list[str]:
    """What `dask scheduler` and `dask worker` are given, to use these certificates."""
    return [f"--tls-{name[4:]}{'-file' if name == 'tls_ca' else ''}={path}" for name, path in certificates.items()]
