"""Fans small tasks out over the workers: indexing chunks, counting parts.

Any worker may run a task, even twice. A task that only hung workers have is submitted again, so that none of them holds
the job up.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client, Future

from ..cluster.connect import hung_workers, placement_of_tasks
from .control import JobControl

_CHECK_INTERVAL_S = 0.5
_LOOK_INTERVAL_S = 2.0
_RETRIES = 3
_MAX_SUBMITTED = 3


class FanOut:
    """Runs `function(item, **same)` once per item on the workers. `name`: of the tasks; unique."""

    def __init__(
        self, client: Client, function: Callable[..., Any], items: Sequence[Any], name: str, **same: Any
    ) -> None:
        self._client = client
        self._function = function
        self._items = items
        self._name = name
        self._same = same
        self._ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        # Key of a task -> number of its item; items of hung workers are submitted again under another key.
        self._numbers: dict[str, int] = {}
        # Of tasks that have not ended; those of the others are released at once.
        self._futures: dict[str, Future[Any]] = {}
        self._waiting = set(range(len(items)))
        self._num_submitted: Counter[int] = Counter()

    def results(self, control: JobControl) -> Iterator[Any]:
        """Results as they arrive. Raises what a task raises, and what `control` raises."""
        self._submit(sorted(self._waiting))
        looked_s = time.monotonic()
        try:
            while self._waiting:
                control.check()
                with suppress(queue.Empty):
                    future = self._ended.get(timeout=_CHECK_INTERVAL_S)
                    self._futures.pop(str(future.key), None)
                    number = self._numbers[str(future.key)]
                    if number in self._waiting:
                        result = future.result()
                        self._waiting.discard(number)
                        yield result
                if time.monotonic() - looked_s > _LOOK_INTERVAL_S:
                    looked_s = time.monotonic()
                    self._submit(self._held_up())
        finally:
            self._client.cancel(list(self._futures.values()))

    def _submit(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        self._num_submitted.update(numbers)
        keys = [f"{self._name}-{number}-{self._num_submitted[number]}" for number in numbers]
        self._numbers |= dict(zip(keys, numbers, strict=True))
        items = [self._items[number] for number in numbers]
        where = placement_of_tasks(self._client)
        futures = self._client.map(self._function, items, key=keys, retries=_RETRIES, pure=False, **where, **self._same)
        self._futures |= dict(zip(keys, futures, strict=True))
        for future in futures:
            future.add_done_callback(self._ended.put)

    def _held_up(self) -> list[int]:
        """Items that only hung workers have; those that were submitted often enough are left to Dask."""
        hung = hung_workers(self._client)
        if not hung:
            return []
        processing = self._client.processing()
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for worker, keys in processing.items():
            found[worker in hung] |= {self._numbers[key] for key in map(str, keys) if key in self._numbers}
        held_up = (found[True] - found[False]) & self._waiting
        return sorted(number for number in held_up if self._num_submitted[number] < _MAX_SUBMITTED)
