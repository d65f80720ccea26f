"""A coordinator without a sign of life is started on another worker: what we rely on in Dask's scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, get_worker

from lorabatch.pipeline.coordinator_lease import CoordinatorLease
from lorabatch.pipeline.lease_keeper import job_key, keep_leases


@pytest.fixture
def client() -> Iterator[Client]:
    """Two workers in this process, and a scheduler that keeps leases."""
    options = {"n_workers": 2, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        keep_leases(client)
        yield client


def coordinate(address: str, run_id: str, folder: Path, is_over: str) -> tuple[str, int | None]:
    """Where it ran and as which attempt. The first who comes takes its lease, and then is silent until the end."""
    worker = str(get_worker().address)
    with Client(address, set_as_default=False) as own:
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            with CoordinatorLease(own, run_id, 60.0) as lease:
                return worker, lease.attempt
        (folder / "first").write_text(worker)
        silent = CoordinatorLease(own, run_id, 1.0)
        silent._keep = lambda: None  # type: ignore[method-assign]
        silent._thread = threading.Thread(target=silent._keep)
        with silent:
            pause = threading.Event()
            while not (folder / is_over).exists():
                pause.wait(0.05)
            # The second has come and gone meanwhile.
            (folder / "lost").write_text(str(silent.is_lost))
    return worker, 0


def test_a_silent_coordinator_is_started_elsewhere_and_knows_that_it_is_displaced(
    client: Client, tmp_path: Path
) -> None:
    address = client.scheduler_info(n_workers=0)["address"]
    future = client.submit(coordinate, address, "run", tmp_path, "over", key=job_key("run"), pure=False)
    worker, attempt = future.result(timeout=60)
    assert worker != (tmp_path / "first").read_text()
    assert attempt is not None
    assert attempt >= 2  # the first's number, then nobody's
    (tmp_path / "over").touch()
    pause = threading.Event()
    while not (tmp_path / "lost").exists() or not (tmp_path / "lost").read_text():
        pause.wait(0.05)
    assert (tmp_path / "lost").read_text() == "True"


def test_a_coordinator_that_renews_is_left_alone(client: Client) -> None:
    with CoordinatorLease(client, "run", 1.0) as lease:
        threading.Event().wait(3.0)
        assert not lease.is_lost
        with CoordinatorLease(client, "run", 1.0):
            assert lease._client.status == "running"
            lease._renew()
            assert lease.is_lost


def test_without_a_keeper_no_lease_is_lost() -> None:
    options = {"n_workers": 1, "processes": False, "dashboard_address": None}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
        CoordinatorLease(client, "run", 0.2) as lease,
    ):
        assert lease.attempt is None
        threading.Event().wait(0.5)
        assert not lease.is_lost
