"""A silent coordinator is started on another worker: what is relied on in Dask's scheduler.

One attempt at a time holds the lease of a run, and no coordinator is replaced that renews it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, Scheduler, get_worker
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.coordinator import lease as leases_module
from lorabatch.pipeline.coordinator.lease import CoordinatorLease, Leases, keep_leases
from lorabatch.pipeline.messages import job_key

# Lets `take_the_thread` end: the workers of the tests are in this process.
MAY_END = threading.Event()


def take_the_thread() -> bool:
    """Another user's task."""
    return MAY_END.wait(60)


@pytest.fixture
def client() -> Iterator[Client]:
    """Two workers in this process, and a scheduler that keeps leases."""
    options = {"n_workers": 2, "threads_per_worker": 2, "processes": False, "dashboard_address": "127.0.0.1:0"}
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
        with CoordinatorLease(own, run_id, 1.0, renew_interval_s=1000.0) as silent:
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
    assert attempt >= 2  # the first's number, then one that no coordinator has
    (tmp_path / "over").touch()
    pause = threading.Event()
    while not (tmp_path / "lost").exists() or not (tmp_path / "lost").read_text():
        pause.wait(0.05)
    assert (tmp_path / "lost").read_text() == "True"


def coordinate_until(address: str, run_id: str, folder: Path) -> str:
    """Where it ended. Each attempt writes its worker's address; all but the third are silent until there is `over`."""
    worker = str(get_worker().address)
    number = len(list(folder.glob("attempt-*")))
    with Client(address, set_as_default=False) as own, CoordinatorLease(own, run_id, 1.0, renew_interval_s=1000.0):
        (folder / f"attempt-{number}").write_text(worker)
        pause = threading.Event()
        while number < 2 and not (folder / "over").exists():
            pause.wait(0.05)
    return worker


def test_one_that_is_lost_after_it_took_over_is_started_on_a_worker_that_comes_later(tmp_path: Path) -> None:
    options = {"n_workers": 2, "threads_per_worker": 2, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        keep_leases(client)
        address = client.scheduler_info(n_workers=0)["address"]
        future = client.submit(coordinate_until, address, "run", tmp_path, key=job_key("run"), pure=False)
        pause = threading.Event()
        while not (tmp_path / "attempt-1").exists():
            pause.wait(0.05)
        before = {worker.address for worker in cluster.workers.values()}
        # a worker that has died leaves its tasks to others, and there are none
        client.run_on_scheduler(_lose_all_workers)
        (tmp_path / "over").touch()
        cluster.scale(3)
        assert future.result(timeout=60) not in before


def own_address() -> str:
    return str(get_worker().address)


def test_one_that_is_not_begun_is_started_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "BEGIN_LIMIT_S", 1.0)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        keep_leases(client)
        taken, free = (worker.address for worker in cluster.workers.values())
        other = client.submit(take_the_thread, workers=[taken], pure=False)
        where = {"workers": [taken], "allow_other_workers": True}
        future = client.submit(own_address, key=job_key("run"), pure=False, **where)
        assert future.result(timeout=60) == free
        assert not other.done()
        MAY_END.set()
        assert other.result(timeout=60)


async def _lose_all_workers(dask_scheduler: Scheduler) -> None:
    for address in list(dask_scheduler.workers):
        await dask_scheduler.remove_worker(address, stimulus_id="test", expected=True)


@pytest.mark.long
def test_a_coordinator_that_renews_is_left_alone(client: Client) -> None:
    with CoordinatorLease(client, "run", 1.0) as lease:
        threading.Event().wait(3.0)
        assert not lease.is_lost
        with CoordinatorLease(client, "run", 1.0):
            threading.Event().wait(1.0)
            assert lease.is_lost


def test_a_displaced_coordinator_that_ends_does_not_end_the_lease_of_the_next(client: Client) -> None:
    with CoordinatorLease(client, "run", 30.0) as first, CoordinatorLease(client, "run", 30.0, 0.1) as second:
        first.end()
        threading.Event().wait(0.5)
        assert not second.is_lost


def test_without_the_plugin_no_lease_is_lost() -> None:
    options = {"n_workers": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(**options) as cluster,
        Client(cluster, set_as_default=False) as client,
        CoordinatorLease(client, "run", 0.2) as lease,
    ):
        assert lease.attempt is None
        threading.Event().wait(0.5)
        assert not lease.is_lost


def test_a_coordinator_that_renews_keeps_its_lease() -> None:
    leases = Leases(0.0)
    attempt = leases.take("run", 20.0, 0.0)
    for second in range(60):
        assert leases.renew("run", attempt, float(second))
        assert leases.lapsed(float(second)) == []


def test_one_that_is_silent_is_named_once_it_was_silent_for_its_limit() -> None:
    leases = Leases(0.0)
    leases.take("short", 5.0, 0.0)
    leases.take("long", 50.0, 0.0)
    assert [leases.lapsed(float(second)) for second in (3, 5, 6)] == [[], [], ["short"]]


def test_a_replaced_coordinator_holds_nothing_even_before_the_next_one_has_started() -> None:
    leases = Leases(0.0)
    first = leases.take("run", 5.0, 0.0)
    leases.pass_on("run", 6.0)
    assert not leases.renew("run", first, 6.5)
    assert leases.lapsed(10.0) == []
    second = leases.take("run", 5.0, 10.0)
    assert leases.renew("run", second, 11.0)
    assert not leases.renew("run", first, 11.0)


def test_a_second_coordinator_ends_the_first() -> None:
    leases = Leases(0.0)
    first, second = (leases.take("run", 5.0, 0.0) for _ in range(2))
    assert not leases.renew("run", first, 1.0)
    assert leases.renew("run", second, 1.0)


def test_the_time_in_which_the_scheduler_itself_was_stopped_is_no_silence() -> None:
    leases = Leases(0.0)
    leases.take("run", 5.0, 0.0)
    assert leases.lapsed(1.0) == []
    assert leases.lapsed(1000.0) == []
    assert leases.lapsed(1003.0) == []
    assert leases.lapsed(1006.0) == ["run"]


def test_an_ended_run_has_no_lease() -> None:
    leases = Leases(0.0)
    attempt = leases.take("run", 5.0, 0.0)
    leases.end("run")
    assert not leases.renew("run", attempt, 1.0)
    assert leases.lapsed(5.0) == []


@given(st.lists(st.tuples(st.sampled_from(["take", "renew", "pass_on"]), st.integers(0, 4)), max_size=40))
def test_at_most_one_attempt_holds_a_run_and_it_is_the_latest(steps: list[tuple[str, int]]) -> None:
    leases = Leases(0.0)
    attempts = [leases.take("run", 5.0, 0.0)]
    is_passed_on = False
    for step, which in steps:
        match step:
            case "take":
                attempts.append(leases.take("run", 5.0, 0.0))
                is_passed_on = False
            case "pass_on":
                leases.pass_on("run", 0.0)
                is_passed_on = True
            case _:
                attempt = attempts[which % len(attempts)]
                assert leases.renew("run", attempt, 0.0) == (attempt == attempts[-1] and not is_passed_on)
    assert len(set(attempts)) == len(attempts)
