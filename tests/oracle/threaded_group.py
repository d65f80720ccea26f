"""Tensor-parallel engines whose members are threads of this process: the same code, without the seconds of a start."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.parallel.cpu_backend import choose_group_backend
from lorabatch.engine.parallel.member import Inbox, serve
from lorabatch.engine.parallel.messages import TO_MEMBER
from lorabatch.engine.server.frames import read_frame
from lorabatch.scheduler.batchers.batching import Batcher
from lorabatch.system.codec import MessageError


class ThreadedMember:
    """A member as a thread, in place of its process. Killing it takes effect between two messages."""

    def __init__(self, config: EngineConfig, inherited: Sequence[int]) -> None:
        self.pid = os.getpid()
        to_member, from_leader = os.pipe()
        to_leader, from_member = os.pipe()
        self.stdin, self.stdout = os.fdopen(from_leader, "wb"), os.fdopen(to_leader, "rb")
        self._inbox: Inbox = queue.SimpleQueue()
        self._code = 0
        self._reader = threading.Thread(target=self._read, args=(to_member,), daemon=True)
        self._thread = threading.Thread(target=self._serve, args=(from_member,), daemon=True)
        self._reader.start()
        self._thread.start()

    def kill(self) -> None:
        self._inbox.put(MessageError("killed"))

    def wait(self) -> int:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the member waits for ever"
        return self._code

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as inlet:
            while (message := read_frame(inlet, TO_MEMBER)) is not None:
                self._inbox.put(message)

    def _serve(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "wb") as outlet:
            self._code = serve(self._inbox, outlet)


def make_group(
    model: Path, num_members: int, mode: Mode = "unmerged", batcher: Batcher | None = None, **config: Any
) -> Engine:
    """An engine of so many members, to be closed."""
    settings = {"max_batch_rows": 8, "max_step_tokens": 24, "pool_bytes": 4 << 20, "num_threads": 1} | config
    asked = EngineConfig(mode=mode, tensor_parallel=num_members, **settings)
    return Engine(model, asked, batcher, partial(choose_group_backend, start=ThreadedMember))
