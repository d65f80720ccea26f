"""Replay of a job: its recorded events through new Schedulers must give the recorded commands, one by one.

An event log (`events.jsonl`) is a sequence of objects: how a scheduler began, then each event followed by the
commands it gave. A job with several coordinators, or one that was resumed, has several beginnings; each is replayed by
itself. Those of another version of the events are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..messages import BEGINNING, EVENTS_VERSION, Command, Event
from ..planning.waves import Shard
from ..policies import make_scheduler
from ..settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of a replay."""

    #: Events whose commands agree.
    num_events: int
    #: Commands that these events gave.
    num_commands: int
    #: Schedulers whose events are of another version.
    num_passed_over: int = 0
    #: (event number, recorded commands, commands given now); None when all agree.
    first_difference: tuple[int, list[dict[str, Any]], list[dict[str, Any]]] | None = None


# An event, and the commands that it gave, as recorded.
_Step = tuple[Mapping[str, Any], list[dict[str, Any]]]


def replay(shards: Sequence[Shard], event_log: Iterable[Mapping[str, Any]]) -> ReplayOutcome:
    """Play an event log against the shards of its plan. Raises ValueError for one without a beginning."""
    num_events = num_commands = num_passed_over = 0
    for origin, steps in _runs(event_log):
        if origin.get("version") != EVENTS_VERSION:
            num_passed_over += 1
            continue
        scheduler = make_scheduler(
            shards, committed=origin["committed"], settings=SchedulerSettings.from_json(origin["settings"])
        )
        for event, recorded in steps:
            given = scheduler.handle(Event.from_json(event))
            if given != [Command.from_json(command) for command in recorded]:
                found = [command.to_json() for command in given]
                return ReplayOutcome(num_events, num_commands, num_passed_over, (num_events, recorded, found))
            num_events += 1
            num_commands += len(given)
    return ReplayOutcome(num_events, num_commands, num_passed_over)


def _runs(event_log: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[_Step]]]:
    runs: list[tuple[Mapping[str, Any], list[_Step]]] = []
    for line in event_log:
        if line["kind"] == BEGINNING:
            runs.append((line, []))
            continue
        if not runs:
            raise ValueError("the event log does not say how its scheduler began: it is of an older version")
        steps = runs[-1][1]
        # Every line has the time of its event, commands have none.
        if "time_s" in line:
            steps.append((line, []))
        elif steps:
            steps[-1][1].append(dict(line))
    return runs
