"""Connecting to a scheduler that speaks to all its clients at that very moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import LocalCluster, SchedulerPlugin

from lorabatch.pipeline.dask_client import _ATTEMPTS, open_client


class Talkative(SchedulerPlugin):
    """Tells the next clients something as soon as they can be told."""

    def __init__(self, num_clients: int) -> None:
        self._left = num_clients

    def add_client(self, scheduler: Any, client: str) -> None:
        if self._left:
            self._left -= 1
            scheduler.loop.add_callback(lambda: scheduler.client_comms[client].send({"op": "lost-data", "key": "k"}))


@pytest.fixture
def scheduler() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster


def _register(scheduler: LocalCluster, plugin: SchedulerPlugin) -> None:
    scheduler.scheduler.add_plugin(plugin, name="talkative")


def test_a_scheduler_that_says_more_than_its_greeting_is_asked_again(scheduler: LocalCluster) -> None:
    _register(scheduler, Talkative(2))
    with open_client(scheduler.scheduler_address) as client:
        assert client.status == "running"
        assert client.run_on_scheduler(lambda: "answered") == "answered"


def test_one_that_never_stops_talking_is_given_up(scheduler: LocalCluster) -> None:
    _register(scheduler, Talkative(_ATTEMPTS))
    with pytest.raises(AssertionError):
        open_client(scheduler.scheduler_address)
