"""Messages on event topics: each one arrives, whenever its reader subscribes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

from lorabatch.pipeline.messages import CoordinatorStarted, StopRun
from lorabatch.pipeline.monitoring.topics import CONTROL, STATES
from lorabatch.system.codec import MessageError


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", host="127.0.0.1") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


def test_a_message_published_right_after_a_subscription_arrives(cluster: LocalCluster, client: Client) -> None:
    received: list[CoordinatorStarted | StopRun] = []
    has_all = threading.Event()

    def receive(message: CoordinatorStarted | StopRun) -> None:
        received.append(message)
        if len(received) == 20:
            has_all.set()

    with Client(cluster, set_as_default=False) as publisher:
        for turn in range(20):
            CONTROL.subscribe(client, f"run-{turn}", receive)
            CONTROL.publish(publisher, f"run-{turn}", CoordinatorStarted(str(turn)))
        assert has_all.wait(20)
    assert {message.coordinator_id for message in received if isinstance(message, CoordinatorStarted)} == {
        str(turn) for turn in range(20)
    }


def test_later_subscribers_find_what_was_published_for_the_run(client: Client) -> None:
    CONTROL.publish(client, "old", CoordinatorStarted("a"))
    CONTROL.publish(client, "old", StopRun())
    CONTROL.publish(client, "other", CoordinatorStarted("b"))
    assert [message for _, message in CONTROL.published(client, "old")] == [CoordinatorStarted("a"), StopRun()]


def test_a_message_of_another_protocol_is_an_error_that_names_it(client: Client) -> None:
    client.log_event(CONTROL.name("foreign"), {"type": "Dance"})
    with pytest.raises(MessageError, match="type='Dance': expected one of StopRun, CoordinatorStarted"):
        CONTROL.published(client, "foreign")


def test_a_topics_name_tells_its_run_and_no_other_topic() -> None:
    assert CONTROL.run_of(CONTROL.name("night-1")) == "night-1"
    assert STATES.run_of(CONTROL.name("night-1")) is None
