"""Dask event topics of a run, with typed messages; the scheduler keeps them for later subscribers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from distributed import Client, Worker

from ...system.codec import Codec
from ..messages import CoordinatorStarted, PublishedState, ShardOutcome, StopRun, StorageWait, WorkerReport

MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class Topic(Generic[MessageT]):
    """A kind of Dask topics, one for each run. `prefix`: beginning of the topics' names; the run's id follows. `codec`:
    encodes the topics' messages.
    """

    prefix: str
    codec: Codec[MessageT]

    def name(self, run_id: str) -> str:
        """Dask's name of a run's topic."""
        return f"{self.prefix}{run_id}"

    def run_of(self, name: str) -> str | None:
        """Id of the run whose topic has this name; None for a topic of another kind."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def publish(self, source: Client | Worker, run_id: str, message: MessageT) -> None:
        """Send a message to all subscribers. On a worker from its event loop only."""
        source.log_event(self.name(run_id), self.codec.encode(message))

    def published(self, client: Client, run_id: str) -> list[tuple[float, MessageT]]:
        """Messages that the scheduler has kept, each with its time in seconds since the epoch, the oldest first."""
        return [(time_s, self.codec.decode(plain)) for time_s, plain in client.get_events(self.name(run_id))]

    def subscribe(self, client: Client, run_id: str, handle: Callable[[MessageT], None]) -> None:
        """Have `handle` called with each message published from now on, in the client's thread.

        `Client.subscribe_topic` returns before the scheduler knows of the subscription; messages published in between
        would be lost.
        """
        name = self.name(run_id)
        client.subscribe_topic(name, lambda event: handle(self.codec.decode(event[1])))
        client.run_on_scheduler(_subscribe, topic=name, client_id=client.id)

    def unsubscribe(self, client: Client, run_id: str) -> None:
        """Have no handler called any more."""
        client.unsubscribe_topic(self.name(run_id))


def _subscribe(dask_scheduler: Any, topic: str, client_id: str) -> None:
    dask_scheduler.subscribe_topic(topic, client_id)


#: Reports of a run's workers, sent about once a second.
REPORTS: Topic[WorkerReport] = Topic("lorabatch-report-", Codec(WorkerReport))
#: Outcomes of shards, from the workers that committed them; each is sent before its task ends.
OUTCOMES: Topic[ShardOutcome] = Topic("lorabatch-outcome-", Codec(ShardOutcome))
#: States of a job, from a run's coordinator to all followers of the job.
STATES: Topic[PublishedState] = Topic("lorabatch-state-", Codec(PublishedState))
#: Waits of a run's workers for storage.
WAITS: Topic[StorageWait] = Topic("lorabatch-storage-", Codec(StorageWait))
#: Messages to the coordinators of a run.
CONTROL: Topic[StopRun | CoordinatorStarted] = Topic("lorabatch-control-", Codec(StopRun, CoordinatorStarted))
