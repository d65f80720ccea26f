"""Small tasks on workers of which some do not reach storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster, get_worker, secede, worker_client

from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.pipeline.coordinator.fan_out import FanOut
from lorabatch.pipeline.coordinator.losses import count_losses


class NoStop:
    """A control that never stops the coordinator."""

    def check(self) -> None:
        return


def square_at(item: int, where: str) -> int:
    """On all other workers there is no storage."""
    if get_worker().address != where:
        raise StorageError("no reply")
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
    options: dict[str, Any] = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=2, **options) as cluster, Client(cluster, set_as_default=False) as client:
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
