"""Small tasks on workers of which some do not reach storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, get_worker, secede, worker_client

from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.pipeline.coordinator import fan_out
from lorabatch.pipeline.coordinator.fan_out import FanOut
from lorabatch.pipeline.coordinator.losses import count_losses

# Lets `take_the_thread` end: the workers of the tests are in this process.
MAY_END = threading.Event()


def take_the_thread() -> bool:
    """Another user's task."""
    return MAY_END.wait(60)


class NoStop:
    """A control that never stops the coordinator."""

    def check(self) -> None:
        return


def square_at(item: int, where: str) -> int:
    """On all other workers there is no storage."""
    if get_worker().address != where:
        raise StorageError("no reply")
    return item * item


def square(item: int) -> int:
    return item * item


def fail(item: int, error: Exception) -> int:
    raise error


def coordinate(function: Any, *, has_storage: bool = True, **same: Any) -> list[int]:
    """Fan five items out, as a coordinator does."""
    secede()
    if function is square_at:
        same["where"] = get_worker().address if has_storage else "nowhere"
    with worker_client() as client:
        tasks = FanOut(client, function, range(5), function.__name__, "1", str, **same)
        return sorted(tasks.results(NoStop()))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options: dict[str, Any] = {"processes": False, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    # As in the recommended settings.
    unstolen = dask.config.set({"distributed.scheduler.work-stealing": False})
    with unstolen, LocalCluster(n_workers=2, **options) as cluster, Client(cluster, set_as_default=False) as client:
        count_losses(client)
        yield client


def test_tasks_end_where_storage_is_reached(client: Client) -> None:
    assert client.submit(coordinate, square_at, pure=False).result(60) == [0, 1, 4, 9, 16]


def test_an_error_of_storage_is_raised_once_the_coordinator_has_it_too(client: Client) -> None:
    with pytest.raises(StorageError, match="no reply"):
        client.submit(coordinate, square_at, has_storage=False, pure=False).result(60)


def test_any_other_error_is_raised(client: Client) -> None:
    with pytest.raises(JobRequestError, match="wrong"):
        client.submit(coordinate, fail, error=JobRequestError("wrong"), pure=False).result(60)


def test_tasks_of_a_worker_that_begins_none_go_to_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "BEGIN_LIMIT_S", 3.0)
    taken, free = client.scheduler_info(n_workers=-1)["workers"]
    other = client.submit(take_the_thread, workers=[taken], priority=1000, pure=False)
    where = {"workers": [free]}
    assert client.submit(coordinate, square, pure=False, **where).result(60) == [0, 1, 4, 9, 16]
    assert not other.done()
    MAY_END.set()
    assert other.result(60)
