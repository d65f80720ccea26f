"""Messages to a process, written by a thread of their own: a process that does not read holds up nobody."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from typing import IO, Any

from ..engine.wire import pack_frame


class FrameWriter:
    """Writes to a process's standard input in the order of `send`, and closes it at the end.

    A pipe takes 64 KiB; what a process has not read beyond that waits in memory, at most what was sent to it. A write
    that blocks ends with the process. A process that is gone is no error here: its exit is reported on its own.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="engine writer", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """The message is written after those before it. Never waits."""
        self._outbox.put(pack_frame(message))

    def close(self) -> None:
        """Close the stream once all is written. Never waits."""
        self._outbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the stream is closed, or the process gone."""
        self._thread.join(timeout_s)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self._stream.write(frame)
                self._stream.flush()
        # What a process that is gone has not read cannot be flushed.
        with contextlib.suppress(OSError):
            self._stream.close()
