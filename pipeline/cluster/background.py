"""Runs an embedded cluster as a process of its own, for jobs that outlive the command that submitted them.

There is one per user and machine. It writes its address and its key into a state file, and ends itself when it has been
idle for a while: `python -m lorabatch.pipeline.cluster.background STATE_FILE NUM_WORKERS`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client

from ...jobs.errors import JobFailedError
from ...system.confinement import python_command
from ...system.local_cache import file_lock, make_private
from .background_state import BackgroundCluster
from .connect import embedded, existing, open_client, page_address

# Seconds without a job after which the cluster ends.
IDLE_LIMIT_S = 60.0
_LOOK_INTERVAL_S = 2.0
_START_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT = "5s"


@contextmanager
def background_client(path: Path, num_workers: int, gpus_each: int = 1) -> Iterator[tuple[BackgroundCluster, Client]]:
    """The cluster of a state file and a client of it. A cluster with `num_workers` workers, each with `gpus_each` GPUs,
    is started when none answers.

    Commands at the same moment find the same cluster, and it does not end between being found and being connected to.
    Raises `JobFailedError` when it does not start.
    """
    with ExitStack() as connection:
        with file_lock(_lock_file(path)):
            found = find_cluster(path) or start_cluster(path, num_workers, gpus_each)
            client = connection.enter_context(existing(found.address, found.security))
        yield found, client


def find_cluster(path: Path) -> BackgroundCluster | None:
    """The cluster of a state file, if it still answers."""
    try:
        found = BackgroundCluster.read(path)
        with open_client(found.address, timeout=_CONNECT_TIMEOUT, security=found.security):
            return found
    except (OSError, ValueError, TypeError):
        return None


def start_cluster(path: Path, num_workers: int, gpus_each: int = 1) -> BackgroundCluster:
    """Start a background cluster and wait until it is ready. Raises `JobFailedError` when it does not start."""
    make_private(path.parent)
    path.unlink(missing_ok=True)
    log_path = path.with_suffix(".log")
    with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        process = subprocess.Popen(
            python_command(__name__, str(path), str(num_workers), str(gpus_each)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The cluster outlives Ctrl-C in the terminal and the terminal itself.
            start_new_session=True,
        )
    # Waits for the cluster's process: one that ends before this process would stay a zombie.
    threading.Thread(target=process.wait, name="background cluster", daemon=True).start()
    give_up_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < give_up_s and process.poll() is None:
        if path.exists():
            return BackgroundCluster.read(path)
        time.sleep(0.1)
    process.kill()
    raise JobFailedError(f"cluster='local': the background cluster did not start; {log_path} says why.")


def serve(path: Path, num_workers: int, gpus_each: int = 1, idle_limit_s: float = IDLE_LIMIT_S) -> None:
    """Run the cluster until it has been idle for `idle_limit_s`."""
    with embedded(num_workers, gpus_each=gpus_each) as client:
        security = client.security
        found = BackgroundCluster(
            address=client.scheduler_info(n_workers=0)["address"],
            dashboard=page_address(client),
            pid=os.getpid(),
            num_workers=num_workers,
            certificate=security.tls_client_cert,
            key=security.tls_client_key,
        )
        found.write(path)
        busy_s = time.monotonic()
        while time.monotonic() - busy_s < idle_limit_s or not withdraw(path, found, client):
            time.sleep(_LOOK_INTERVAL_S)
            if client.run_on_scheduler(_is_busy, own_client=client.id):
                busy_s = time.monotonic()


def withdraw(path: Path, own: BackgroundCluster, client: Client) -> bool:
    """Remove the state file, so that no command finds a cluster that is about to end. False when a command has found
    it by now.
    """
    with file_lock(_lock_file(path)):
        if client.run_on_scheduler(_is_busy, own_client=client.id):
            return False
        # Another cluster may have taken the place of one that did not answer.
        with suppress(OSError, ValueError, TypeError):
            if BackgroundCluster.read(path) == own:
                path.unlink()
        return True


def _lock_file(path: Path) -> Path:
    return path.with_suffix(".lock")


def _is_busy(dask_scheduler: Any, own_client: str) -> bool:
    """Whether a task is unfinished, or a command is connected."""
    is_working = any(
        task.state in ("processing", "queued", "waiting", "no-worker") for task in dask_scheduler.tasks.values()
    )
    others = [name for name in dask_scheduler.clients if name != own_client and name.startswith("Client-")]
    return is_working or bool(others)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
