"""Counts the workers that are lost while they have tasks of a fan-out, so that a task that ends workers can be named.

`LossesPlugin` on the Dask scheduler counts, since the coordinator may be on one of these workers. Dask would hand all
tasks of a lost worker to the next one, which the same task may end. Tasks of a fan-out end at the first loss instead,
and `FanOut` runs them apart. Beside documented names the plugin uses `TaskState.suspicious` and Dask's event about a
lost worker in the topic "all"; the test of this file says what is relied on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from ...system.codec import Codec
from ...version import __version__
from ..messages import JOB_PREFIX

# Workers lost with an item after which it is given up, whatever else they ran: a task that is never alone on a worker
# cannot be distinguished from its neighbours.
_MAX_LOST = 4
# Seconds for which a released task still counts as its worker's. A coordinator's tasks are released when its own worker
# is lost, perhaps before Dask counts that worker as lost.
_RELEASED_S = 5.0
# Prefixes of keys of tasks that do not end their worker: engines are processes of their own.
_HARMLESS = (JOB_PREFIX, "('lora_shard-")
_PREFIX = "lora_task-"
_LOSSES_OP = "lorabatch_losses"


def task_key(name: str, attempt: str, number: int, submission: int) -> str:
    """The key of a fan-out's task. `name`: name of the fan-out, the same for all coordinators of a run. `attempt`: id
    of the coordinator. `number`: number of the item. `submission`: how often the coordinator has submitted it.
    """
    return f"{task_prefix(name, attempt)}{number}/{submission}"


def task_prefix(name: str, attempt: str) -> str:
    """Prefix of the keys of one fan-out's tasks, as one coordinator submits them."""
    return f"{_PREFIX}{name}/{attempt}/"


def number_of(key: str) -> int:
    """Number of the item that a fan-out's task is for."""
    return int(key.rsplit("/", 2)[1])


def _name_of(key: str) -> str:
    return key.removeprefix(_PREFIX).rsplit("/", 3)[0]


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class ItemLosses:
    """Counts of the workers that were lost while they had the task of one item."""

    #: Number of the item.
    number: int
    #: Workers that were lost.
    num_lost: int
    #: Workers that were lost while they had no other task that may end a worker.
    num_alone: int

    @property
    def is_deadly(self) -> bool:
        """Whether to give the item up: two workers were lost with it, one of which had no other task, or `_MAX_LOST`
        workers.
        """
        return self.num_lost >= _MAX_LOST or (self.num_lost > 1 and self.num_alone > 0)


_ITEMS: Codec[ItemLosses] = Codec(ItemLosses)


@dataclass(slots=True)
class Losses:
    """Losses of all fan-outs of a cluster, by name of the fan-out and number of the item."""

    #: Workers lost with an item.
    _lost: dict[str, Counter[int]] = field(default_factory=dict)
    #: Workers lost with an item while they had no other task that may end a worker.
    _alone: dict[str, Counter[int]] = field(default_factory=dict)

    def add(self, keys: Iterable[str]) -> None:
        """Count a worker that was lost with these tasks. `keys`: the tasks' keys as text."""
        suspects = [key for key in keys if not key.startswith(_HARMLESS)]
        for key in filter(_is_ours, suspects):
            name, number = _name_of(key), number_of(key)
            self._lost.setdefault(name, Counter())[number] += 1
            self._alone.setdefault(name, Counter())[number] += len(suspects) == 1

    def of(self, name: str) -> tuple[ItemLosses, ...]:
        """Losses of the items of one fan-out, in order of their numbers."""
        lost = self._lost.get(name, Counter())
        return tuple(ItemLosses(number, lost[number], self._alone[name][number]) for number in sorted(lost))


class LossesPlugin(SchedulerPlugin):
    """Counts losses for all fan-outs of a cluster, and has Dask end their tasks when a worker is lost with them."""

    name = f"lorabatch-losses-{__version__}"
    # Each job registers the plugin again, which must not forget the losses.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the operation that `losses_of` calls. Dask calls this on the scheduler."""
        self._scheduler = scheduler
        self._losses = Losses()
        # Task -> worker that has it.
        self._workers: dict[str, str] = {}
        # (time of release in seconds, key, worker) of tasks that a worker had and that were released.
        self._released: deque[tuple[float, str, str]] = deque()
        scheduler.handlers[_LOSSES_OP] = self._reply

    async def _reply(self, name: str) -> list[dict[str, Any]]:
        """The losses of the fan-out `name`, encoded."""
        return [_ITEMS.encode(item) for item in self._losses.of(name)]

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Keep track of the workers of a fan-out's tasks. Dask calls this for every task; most are of no fan-out."""
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
        """Count the tasks of a worker that was lost unexpectedly. Dask calls this for every event of every topic."""
        if topic != "all" or msg.get("action") != "remove-worker" or msg["expected"]:
            return
        while self._released and time.monotonic() - self._released[0][0] > _RELEASED_S:
            self._released.popleft()
        released = [key for _, key, worker in self._released if worker == msg["worker"]]
        self._losses.add({*map(str, msg["processing-tasks"]), *released})


def count_losses(client: Client) -> None:
    """Have the cluster's scheduler count losses."""
    client.register_plugin(LossesPlugin())


def losses_of(client: Client, name: str) -> dict[int, ItemLosses]:
    """Losses of one fan-out by number of the item, from the Dask scheduler."""
    call = getattr(client.scheduler, _LOSSES_OP)
    items = map(_ITEMS.decode, client.sync(call, name=name))
    return {item.number: item for item in items}
