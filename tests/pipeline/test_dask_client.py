"""A scheduler that speaks to all its clients while one connects, and what is said while one begins to listen."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster, SchedulerPlugin

from lorabatch.pipeline.dask_client import _ATTEMPTS, open_client, subscribe


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


@pytest.mark.parametrize("address", ["carrier-pigeon://127.0.0.1:1", "tls://127.0.0.1:1", "tcp://127.0.0.1:1"])
def test_one_that_could_not_connect_is_closed_and_not_left_to_its_finaliser(address: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError)) as told:
        open_client(address, timeout="1s")
    # not isinstance: torch has an object that warns when asked for its class
    tried = [found for found in gc.get_objects() if type(found) is Client and found._start_arg == address]
    assert [client.status for client in tried] == ["closed"], told


def test_what_is_said_right_after_somebody_listens_is_heard(scheduler: LocalCluster) -> None:
    heard: list[str] = []
    has_heard = threading.Event()

    def hear(event: tuple[float, str]) -> None:
        heard.append(event[1])
        if len(heard) == 20:
            has_heard.set()

    with open_client(scheduler.scheduler_address) as listener, open_client(scheduler.scheduler_address) as speaker:
        for turn in range(20):
            subscribe(listener, f"topic-{turn}", hear)
            speaker.log_event(f"topic-{turn}", f"said {turn}")
        has_heard.wait(timeout=10)
    assert sorted(heard) == sorted(f"said {turn}" for turn in range(20))
