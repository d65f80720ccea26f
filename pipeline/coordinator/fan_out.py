"""Fans small tasks out over the workers: indexing chunks, counting parts.

Any worker may run a task, even twice. A task that only hung workers have is submitted again, so that a hung worker does
not hold the job up; as is one of a worker that begins none of its tasks, since other users' tasks have its threads.
Tasks that a lost worker had are suspects: they wait until the other tasks are done and then run on workers of their
own. A suspect that has lost two workers, one of them without other tasks, is given up by name. A task that could not
reach storage is run again on the coordinator's own worker, which does reach it: Dask would choose the worker that has
just become free, the same one.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Client, Future, KilledWorker, get_worker

from ...jobs.errors import StorageError
from ..cluster.connect import hung_workers, known_workers, placement_of_tasks
from ..messages import BEGIN_LIMIT_S
from .control import JobControl
from .losses import losses_of, number_of, task_key, task_prefix

_CHECK_INTERVAL_S = 0.5
_LOOK_INTERVAL_S = 2.0
_RETRIES = 3
_MAX_SUBMITTED = 3


class FanOut:
    """Runs `function(item, **same)` once per item on the workers.

    `name`: name of the fan-out, the same for all coordinators of a run. `attempt`: id of this coordinator. `deadly`:
    returns the result, or raises the error, of an item that is given up because its workers were lost.
    """

    def __init__(
        self,
        client: Client,
        function: Callable[..., Any],
        items: Sequence[Any],
        name: str,
        attempt: str,
        deadly: Callable[[Any], Any],
        **same: Any,
    ) -> None:
        self._client = client
        self._function = function
        self._items = items
        self._name = name
        self._attempt = attempt
        self._deadly = deadly
        self._same = same
        self._ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        # Futures of tasks that have not ended, by key. Those of ended tasks are released at once.
        self._futures: dict[str, Future[Any]] = {}
        self._waiting = set(range(len(items)))
        # Numbers of waiting items that are held back, because a worker was lost with them.
        self._suspects: set[int] = set()
        # Workers that have tasks and run none -> those tasks, and since when in seconds.
        self._idle: dict[str, tuple[frozenset[int], float]] = {}
        self._num_submitted: Counter[int] = Counter()
        self._num_failed: Counter[int] = Counter()

    def results(self, control: JobControl) -> Iterator[Any]:
        """Results as they arrive. Raises what a task raises, and what `control` raises."""
        self._suspects = self._waiting & losses_of(self._client, self._name).keys()
        self._submit(sorted(self._waiting - self._suspects))
        looked_s = time.monotonic()
        try:
            while self._waiting:
                control.check()
                if self._suspects == self._waiting:
                    yield from self._judged()
                with suppress(queue.Empty):
                    yield from self._taken(self._ended.get(timeout=_CHECK_INTERVAL_S))
                if time.monotonic() - looked_s > _LOOK_INTERVAL_S:
                    looked_s = time.monotonic()
                    self._submit(self._held_up())
        finally:
            self._client.cancel(list(self._futures.values()))

    def _taken(self, future: Future[Any]) -> Iterator[Any]:
        """The result of a task that has ended, unless its item is done already or has become a suspect."""
        self._futures.pop(str(future.key), None)
        number = number_of(str(future.key))
        if number not in self._waiting:
            return
        try:
            result = future.result()
        except KilledWorker:
            self._suspects.add(number)
            return
        if isinstance(result, StorageError):
            self._try_again(number, result)
            return
        self._waiting.discard(number)
        self._suspects.discard(number)
        yield result

    def _try_again(self, number: int, error: StorageError) -> None:
        self._num_failed[number] += 1
        if self._num_failed[number] > _RETRIES:
            raise error
        self._submit([number], workers=[get_worker().address])

    def _judged(self) -> Iterator[Any]:
        """Give up suspects that are deadly, and submit others, each to a worker of its own. Suspects that have lost two
        workers or more run one at a time, since some workers run several tasks.
        """
        losses = losses_of(self._client, self._name)
        for number in sorted(n for n in self._suspects if n in losses and losses[n].is_deadly):
            self._waiting.discard(number)
            self._suspects.discard(number)
            yield self._deadly(self._items[number])
        hung = hung_workers(self._client)
        workers = sorted(set(known_workers(self._client) or ()) - hung)
        once = sorted(n for n in self._suspects if n not in losses or losses[n].num_lost < 2)
        turn = once[: max(len(workers), 1)] or sorted(self._suspects)[:1]
        for i, number in enumerate(turn):
            self._suspects.discard(number)
            self._submit([number], **({"workers": [workers[i]], "allow_other_workers": True} if workers else {}))

    def _submit(self, numbers: Sequence[int], **where: Any) -> None:
        if not numbers:
            return
        self._num_submitted.update(numbers)
        keys = [task_key(self._name, self._attempt, number, self._num_submitted[number]) for number in numbers]
        items = [self._items[number] for number in numbers]
        where = where or placement_of_tasks(self._client, self._busy())
        task = partial(_result_or_storage_error, self._function, self._same)
        futures = self._client.map(task, items, key=keys, retries=_RETRIES, pure=False, **where)
        self._futures |= dict(zip(keys, futures, strict=True))
        for future in futures:
            future.add_done_callback(self._ended.put)

    def _held_up(self) -> list[int]:
        """Items that only workers have which hang or begin nothing; without those that were submitted `_MAX_SUBMITTED`
        times already.
        """
        prefix = task_prefix(self._name, self._attempt)
        tasks = self._client.run_on_scheduler(_tasks_of_workers, prefix=prefix)
        now_s = time.monotonic()
        waiting = {worker: frozenset(map(number_of, keys)) for worker, (keys, num_run) in tasks.items() if not num_run}
        self._idle = {
            worker: before if (before := self._idle.get(worker)) and before[0] == numbers else (numbers, now_s)
            for worker, numbers in waiting.items()
        }
        late = hung_workers(self._client) | self._busy()
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for worker, (keys, _) in tasks.items():
            found[worker in late] |= {number_of(key) for key in keys}
        held_up = (found[True] - found[False]) & self._waiting
        return sorted(number for number in held_up if self._num_submitted[number] < _MAX_SUBMITTED)

    def _busy(self) -> set[str]:
        """Workers that have not begun one of their tasks within `BEGIN_LIMIT_S`, nor finished one meanwhile."""
        now_s = time.monotonic()
        return {worker for worker, (_, since_s) in self._idle.items() if now_s - since_s > BEGIN_LIMIT_S}


def _tasks_of_workers(dask_scheduler: Any, prefix: str) -> dict[str, tuple[list[str], int]]:
    """Worker -> keys of the tasks with this prefix that it has, and how many of them it runs."""
    found = {}
    for worker in dask_scheduler.workers.values():
        tasks = [task for task in worker.processing if str(task.key).startswith(prefix)]
        if tasks:
            found[worker.address] = ([task.key for task in tasks], sum(task in worker.executing for task in tasks))
    return found


def _result_or_storage_error(function: Callable[..., Any], same: Mapping[str, Any], item: Any) -> Any:
    """Call the function and return its result, or its `StorageError`: Dask does not retry a task that returns."""
    try:
        return function(item, **same)
    except StorageError as error:
        return error
