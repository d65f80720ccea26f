"""Fans small tasks out over the workers: indexing chunks, counting parts.

Any worker may run a task, even twice. A task that only hung workers have is submitted again, so that a hung worker does
not hold the job up. Tasks that a lost worker had are suspects: they wait until the other tasks are done and then run on
workers of their own. A suspect that has lost two workers, one of them without other tasks, is given up by name. A task
that could not reach storage is run again on the coordinator's own worker, which does reach it: Dask would choose the
worker that has just become free, the same one.
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
from .control import JobControl
from .losses import losses_of, number_of, task_key

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
        where = where or placement_of_tasks(self._client)
        task = partial(_result_or_storage_error, self._function, self._same)
        futures = self._client.map(task, items, key=keys, retries=_RETRIES, pure=False, **where)
        self._futures |= dict(zip(keys, futures, strict=True))
        for future in futures:
            future.add_done_callback(self._ended.put)

    def _held_up(self) -> list[int]:
        """Items that only hung workers have; without those that were submitted `_MAX_SUBMITTED` times already."""
        hung = hung_workers(self._client)
        if not hung:
            return []
        processing = self._client.processing()
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for worker, keys in processing.items():
            found[worker in hung] |= {number_of(key) for key in map(str, keys) if key in self._futures}
        held_up = (found[True] - found[False]) & self._waiting
        return sorted(number for number in held_up if self._num_submitted[number] < _MAX_SUBMITTED)


def _result_or_storage_error(function: Callable[..., Any], same: Mapping[str, Any], item: Any) -> Any:
    """Call the function and return its result, or its `StorageError`: Dask does not retry a task that returns."""
    try:
        return function(item, **same)
    except StorageError as error:
        return error
