"""A job's states on their way from its coordinator to whoever follows it, by a Dask event topic."""

from __future__ import annotations

from typing import Any

from distributed import Client

from ..jobs.state import JobState

# Followed by the run's id.
STATE_TOPIC = "lorabatch-state-"


class ToldProgress:
    """A `Progress` that tells followers on the cluster. `output`: of the job, free of secrets."""

    def __init__(self, client: Client, run_id: str, output: str) -> None:
        self._client = client
        self._output = output
        self._topic = state_topic(run_id)

    def update(self, state: JobState) -> None:
        """See `Progress`."""
        if self._client.status == "running":
            self._client.log_event(self._topic, {"state": state.to_json(), "output": self._output})

    def note(self, text: str) -> None:
        """See `Progress`."""
        if self._client.status == "running":
            self._client.log_event(self._topic, {"note": text})


def state_topic(run_id: str) -> str:
    """The Dask event topic of a run's states."""
    return f"{STATE_TOPIC}{run_id}"


def state_of(message: dict[str, Any]) -> JobState | None:
    """The state in a message of the topic, if it carries one."""
    return JobState.from_json(message["state"]) if "state" in message else None
