"""The engine as a process of its own: `python -m lorabatch.engine.server.process [MODULE]`, driven over its standard
streams. MODULE is imported before the first message.

A crash or an out-of-memory kill then costs one engine, not the Dask worker with its bookkeeping, and the interpreter
lock of the worker never waits for a step. `frames.py` has the messages.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ...system.codec import Codec, MessageError
from ...system.untrusted import LogFormatter, NoProcessError
from ..config import EngineConfig
from ..errors import EngineError, curable
from ..request import ExportedRow, Result
from ..telemetry import EngineTelemetry
from .frames import (
    FROM_ENGINE,
    TO_ENGINE,
    AbortRows,
    AddRows,
    ExpectRows,
    Exported,
    ExportRows,
    Fatal,
    FromEngine,
    Heartbeat,
    Ready,
    RegisterAdapter,
    Results,
    RowTokens,
    Start,
    Stop,
    ToEngine,
    read_frame,
    write_frame,
)

logger = logging.getLogger(__name__)
PROGRESS_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 1.0
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_VMSTAT = Path("/proc/vmstat")
# Parts of what torch's allocators say where they raise a plain RuntimeError.
_MEMORY_ERRORS = ("can't allocate memory", "not enough memory", "out of memory")


class RunsRequests(Protocol):
    """The part of an engine that this process uses. `config`: with the limits of a step that the engine keeps to."""

    config: EngineConfig

    def register_adapter(self, adapter_id: str, folder: Path, name: str = "", content_sha256: str = "") -> None:
        """Say where an adapter is stored whose content has this hash; "": its id."""

    def import_rows(self, rows: Sequence[ExportedRow]) -> None:
        """Queue rows, some of them begun by another engine."""

    def export_rows(self, request_ids: Collection[str]) -> list[ExportedRow]:
        """Take unfinished rows out; no result follows for those returned."""

    def expect_rows(self, adapter_id: str, num_rows: int) -> None:
        """Announce `num_rows` more rows of an adapter."""

    def abort(self, request_ids: Collection[str]) -> None:
        """Forget requests; no result follows."""

    def step(self) -> list[Result]:
        """Compute one forward pass; returns the rows that it finished."""

    @property
    def num_unfinished(self) -> int:
        """Requests without a result."""

    def telemetry(self) -> EngineTelemetry:
        """A snapshot between two steps."""

    @property
    def hung_process(self) -> str | None:
        """A process of the engine that gives no sign of life, by name. Any thread may ask."""


# Messages from the reader. `MessageError` is the last item: a frame was malformed.
Inbox = queue.SimpleQueue[ToEngine | MessageError]


class _EngineServer:
    """Feeds one engine from a queue of messages and writes its replies.

    `imported`: a module that is likely to be needed, imported before the first message; "" for none.
    """

    def __init__(self, inbox: Inbox, outlet: BinaryIO, imported: str = "") -> None:
        self._imported = imported
        self._inbox = inbox
        self._outlet = outlet
        self._write_lock = threading.Lock()
        self._refused_adapters: dict[str, str] = {}
        self._last_progress_s = self._busy_s = 0.0
        # Time at which the current step began; None between steps.
        self._step_began_s: float | None = None
        self._engine: RunsRequests | None = None

    def run(self) -> int:
        """Serve until `Stop`; the exit code. A failure of the engine is reported in `Fatal`."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            if self._imported:
                importlib.import_module(self._imported)
            engine = self._start(self._inbox.get())
        except Exception as error:
            # An incomplete model folder does not complete itself: no retry.
            return self._fatal(error, is_permanent=isinstance(error, EngineError))
        try:
            while self._take_messages(engine):
                self._step(engine)
                self._report(engine)
        except Exception as error:
            return self._fatal(error, is_permanent=False)
        return 0

    def _start(self, message: ToEngine | MessageError) -> RunsRequests:
        if not isinstance(message, Start):
            raise MessageError(f"{message!r}: expected Start as the first message")
        began_s = time.monotonic()
        module, _, name = message.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        engine: RunsRequests = factory(Path(message.model), message.config)
        self._engine, config = engine, engine.config
        self._send(Ready(os.getpid(), time.monotonic() - began_s, config.batch_rows, config.step_tokens))
        return engine

    def _take_messages(self, engine: RunsRequests) -> bool:
        """Handle messages that have arrived, waiting only when there is nothing to compute. False: asked to stop."""
        timeout_s = 0.0 if engine.num_unfinished else PROGRESS_INTERVAL_S
        while True:
            try:
                message = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            self._handle(engine, message)
            timeout_s = 0.0

    def _handle(self, engine: RunsRequests, message: ToEngine | MessageError) -> None:
        match message:
            case AddRows():
                self._add(engine, message.rows)
            case RegisterAdapter(adapter_id, folder, name, content_sha256):
                try:
                    engine.register_adapter(adapter_id, Path(folder), name, content_sha256)
                except (EngineError, NoProcessError) as error:
                    self._refused_adapters[adapter_id] = curable(error)
            case ExpectRows():
                engine.expect_rows(message.adapter_id, message.num_rows)
            case ExportRows():
                rows = engine.export_rows(message.request_ids)
                exported = (
                    RowTokens(row.request.request_id, row.token_ids, row.token_logprobs, row.top_logprobs, row.teacher)
                    for row in rows
                )
                self._send(Exported(tuple(exported)))
            case AbortRows():
                engine.abort(message.request_ids)
            case MessageError():
                raise message
            case _:
                raise MessageError(f"{message!r}: not expected after the start")

    def _add(self, engine: RunsRequests, rows: Sequence[ExportedRow]) -> None:
        refused = [row for row in rows if row.request.adapter_id in self._refused_adapters]
        self._send_results(
            [Result.refused(row.request, self._refused_adapters[row.request.adapter_id or ""]) for row in refused]
        )
        engine.import_rows([row for row in rows if row.request.adapter_id not in self._refused_adapters])

    def _step(self, engine: RunsRequests) -> None:
        if engine.num_unfinished:
            self._step_began_s = time.monotonic()
            results = engine.step()
            self._busy_s += time.monotonic() - self._step_began_s
            self._step_began_s = None
            self._send_results(results)

    def _beat(self) -> None:
        """Send heartbeats: a long step is no reason to end a process, a process that is stopped or hangs is. Where the
        engine is several processes, all of them are one."""
        hung_before = None
        with contextlib.suppress(OSError, ValueError):
            while True:
                began_s = self._step_began_s
                hung = None if self._engine is None else self._engine.hung_process
                if hung is None:
                    self._send(Heartbeat(0.0 if began_s is None else time.monotonic() - began_s))
                elif hung != hung_before:
                    logger.warning("%s gives no sign of life: no heartbeats until it does", hung)
                hung_before = hung
                time.sleep(HEARTBEAT_INTERVAL_S)

    def _report(self, engine: RunsRequests) -> None:
        now_s = time.monotonic()
        if now_s - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = now_s
            self._send(replace(engine.telemetry(), busy_s=self._busy_s))

    def _send_results(self, results: Sequence[Result]) -> None:
        if results:
            self._send(Results(tuple(results)))

    def _send(self, message: FromEngine) -> None:
        with self._write_lock:
            write_frame(self._outlet, FROM_ENGINE, message)

    def _fatal(self, error: Exception, is_permanent: bool) -> int:
        self._send(failure(error, is_permanent=is_permanent))
        return 1


def receive_messages(inlet: BinaryIO, inbox: queue.SimpleQueue[Any], codec: Codec[Any] = TO_ENGINE) -> None:
    """Move messages from the parent to the inbox; end the process with the parent, even in a long step."""
    try:
        while (message := read_frame(inlet, codec)) is not None:
            inbox.put(message)
    except MessageError as error:
        inbox.put(error)
        return
    os._exit(0)


def failure(error: Exception, *, is_permanent: bool) -> Fatal:
    """The last message of a process that ends by the error being handled, which is printed with its place."""
    traceback.print_exc()
    sentence = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return Fatal(sentence, is_permanent, is_out_of_memory(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _MEMORY_ERRORS)


def kernel_kills(vmstat: Path = _VMSTAT) -> int:
    """Processes of this machine that Linux has ended for want of memory since it started; 0 where it does not count.

    A process killed by signal 9 while this rose most likely died of memory.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def claim_stdout() -> BinaryIO:
    """A private copy of standard output; descriptor 1 becomes standard error, so no print breaks a frame."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def main() -> int:
    """Entry point of the process."""
    # The supervisor decides when it ends: a worker that has to leave first takes back what was generated.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outlet = claim_stdout()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter(_LOG_FORMAT))  # no other handler is there
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=receive_messages, args=(sys.stdin.buffer, inbox), daemon=True).start()
    try:
        return _EngineServer(inbox, outlet, *sys.argv[1:]).run()
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    # Skip interpreter shutdown: the reader still blocks on its stream, and a device runtime may take seconds.
    code = main()
    sys.stderr.flush()
    os._exit(code)
