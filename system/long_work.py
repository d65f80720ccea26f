"""Reports the progress of long work before a job begins, such as the conversion of a model: what, its size, and how far
it is.

A listener, such as a progress bar, gets the lines, also those of other waits; without one they go into the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_INTERVAL_S = 5.0
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_logger = logging.getLogger(__name__)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Give the lines of this thread's long work to `listener` within the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Callable[[str], None]:
    """The listener of this thread; the log where there is none."""
    return _listener.get() or _logger.info


class LongWork:
    """One piece of work on a known number of bytes. `what`: the beginning of its lines, such as "converting base.gguf".
    `quiet_s`: seconds within which work that is done says nothing. `scope`: what the work is done for once.

    The lines go to the listener of the thread that creates the object, whatever thread adds.
    """

    def __init__(
        self,
        what: str,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet_s: float = 0.0,
        scope: str = "this machine",
    ) -> None:
        self._what, self._num_bytes, self._clock, self._scope = what, num_bytes, clock, scope
        self._say = listener()
        self._num_done, self._is_begun, self._next_s = 0, False, clock() + quiet_s
        if quiet_s == 0:
            self._begin()

    def _begin(self) -> None:
        self._is_begun, self._next_s = True, self._next_s + _INTERVAL_S
        self._say(f"{self._what} ({self._num_bytes / 1e6:,.0f} MB), once for {self._scope}")

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done, and report the share every few seconds."""
        self._num_done += num_bytes
        now_s = self._clock()
        if now_s < self._next_s:
            return
        if not self._is_begun:
            self._begin()
            return
        self._next_s = now_s + _INTERVAL_S
        share = min(self._num_done / max(self._num_bytes, 1), 1.0)
        self._say(f"{self._what}: {share:.0%} of {self._num_bytes / 1e6:,.0f} MB")
