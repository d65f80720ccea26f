"""Counts the workers that are lost while they have tasks of a fan-out, so that a task that ends workers can be named.

`LossesPlugin` on the Dask scheduler counts, since the coordinator may be on one of these workers. Dask would hand all
tasks of a lost worker to the next one, which the same task may end; ours end at the first loss instead, and `FanOut`
runs them apart. Beside documented names it uses `TaskState.suspicious` and what Dask says of a lost worker to the
topic "all"; the test of this file says what is relied on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from ...engine.server.codec import Codec
from ...version import __version__

# Of workers, whatever else they ran: a task that is never alone on one cannot be told from its neighbours.
_MAX_LOST = 4
# The tasks of a coordinator are released when its own worker is lost, perhaps before Dask counts that worker as lost.
_RELEASED_S = 5.0
# Tasks that may be beside others on a worker and do not end it: engines are processes of their own.
_HARMLESS = ("lora_job-", "('lora_shard-")
_PREFIX = "lora_task-"
_LOSSES_OP = "lorabatch_losses"


def task_key(name: str, attempt: str, number: int, submission: int) -> str:
    """The key of a fan-out's task. `name`: of the fan-out, for all coordinators of a run; `attempt`: of one of them."""
    return f"{_PREFIX}{name}/{attempt}/{number}/{submission}"


def number_of(key: str) -> int:
    """Of the item that a task is for."""
    return int(key.rsplit("/", 2)[1])


def _name_of(key: str) -> str:
    return key.removeprefix(_PREFIX).rsplit("/", 3)[0]


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class ItemLosses:
    """Workers that were lost while they had an item's task. `num_alone`: those that had nothing else to do."""

    number: int
    num_lost: int
    num_alone: int

    @property
    def is_deadly(self) -> bool:
        """Whether to give the item up: two workers were lost, one of them by this item."""
        return self.num_lost >= _MAX_LOST or (self.num_lost > 1 and self.num_alone > 0)


@dataclass(frozen=True, slots=True)
class AskLosses:
    """What has been lost to this fan-out?"""

    name: str


@dataclass(frozen=True, slots=True)
class LossesReply:
    """Of each item that a worker was lost with."""

    items: tuple[ItemLosses, ...]


_REQUESTS: Codec[AskLosses] = Codec(AskLosses)
_REPLIES: Codec[LossesReply] = Codec(LossesReply)


@dataclass(slots=True)
class Losses:
    """Of all fan-outs of a cluster. Keys are text."""

    _lost: dict[str, Counter[int]] = field(default_factory=dict)
    _alone: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, keys: Iterable[str]) -> None:
        """A worker was lost with these tasks."""
        suspects = [key for key in keys if not key.startswith(_HARMLESS)]
        for key in filter(_is_ours, suspects):
            name, number = _name_of(key), number_of(key)
            self._lost.setdefault(name, Counter())[number] += 1
            self._alone.setdefault(name, Counter())[number] += len(suspects) == 1

    def of(self, name: str) -> tuple[ItemLosses, ...]:
        """Of one fan-out."""
        lost = self._lost.get(name, Counter())
        return tuple(ItemLosses(number, lost[number], self._alone[name][number]) for number in sorted(lost))


class LossesPlugin(SchedulerPlugin):
    """Counts for all fan-outs of a cluster, and has Dask end their tasks when a worker is lost with them."""

    name = f"lorabatch-losses-{__version__}"
    # Registering it again, as each job does, must not forget what was lost.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask on the scheduler."""
        self._scheduler = scheduler
        self._losses = Losses()
        # Task -> worker that has it.
        self._workers: dict[str, str] = {}
        # Tasks that a worker had and that were released, and when.
        self._released: deque[tuple[float, str, str]] = deque()
        scheduler.handlers[_LOSSES_OP] = self._reply

    async def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        return _REPLIES.encode(LossesReply(self._losses.of(_REQUESTS.decode(request).name)))

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Called by Dask for every task; most are not ours."""
        if not _is_ours(key):
            return
        if finish == "processing":
            task = self._scheduler.tasks[key]
            task.suspicious = self._scheduler.allowed_failures
            if task.processing_on is not None:
                self._workers[key] = task.processing_on.address
        elif start == "processing" and (worker := self._workers.pop(key, None)) and finish == "released":
            self._released.append((time.monotonic(), key, worker))

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by Dask for every event of every topic."""
        if topic != "all" or msg.get("action") != "remove-worker" or msg["expected"]:
            return
        while self._released and time.monotonic() - self._released[0][0] > _RELEASED_S:
            self._released.popleft()
        released = [key for _, key, worker in self._released if worker == msg["worker"]]
        self._losses.add({*map(str, msg["processing-tasks"]), *released})


def count_losses(client: Client) -> None:
    """Have the cluster's scheduler count."""
    client.register_plugin(LossesPlugin())


def losses_of(client: Client, name: str) -> dict[int, ItemLosses]:
    """Of one fan-out, by number of the item."""
    call = getattr(client.scheduler, _LOSSES_OP)
    reply = _REPLIES.decode(client.sync(call, request=_REQUESTS.encode(AskLosses(name))))
    return {item.number: item for item in reply.items}
