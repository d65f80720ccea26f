"""`EngineProcess`: starts an engine process, sends messages to it, reads its messages and ends it.

`spare.py` starts the process. Closing its standard input ends it, also when this process is killed.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO

from ...engine.errors import EngineError
from ...engine.server.frames import (
    FROM_ENGINE,
    TO_ENGINE,
    Fatal,
    FromEngine,
    Ready,
    Start,
    ToEngine,
    encode_frame,
    read_frame,
)
from ...jobs.storage.model_proof import ModelProof
from ...system.codec import MessageError
from ..messages import EngineSettings
from .spare import SpareEngine, start_engine_process

#: Function that takes the messages of a process, and last of all why it is gone: a clause about "it".
Listener = Callable[["EngineProcess", FromEngine | str], None]


class EngineProcess:
    """An engine process that may still be starting. No call waits for it.

    `listener` is called with every message, in a thread of the process's own, and last of all with the clause why the
    process is gone, exactly once. `Ready` is passed on once it is proven that the process has loaded the model whose
    hash the settings name. `spare`: a process that was started before, which is used if it lives.
    """

    def __init__(
        self,
        find_model: Callable[[], Path],
        log_path: Path,
        listener: Listener,
        settings: EngineSettings,
        spare: SpareEngine | None = None,
    ) -> None:
        self._settings = settings
        self._spare = spare
        #: Whether the process was started before this object.
        self.was_spare = False
        self._find_model = find_model
        self._log_path = log_path
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: FrameWriter | None = None
        self._proof: ModelProof | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, name="engine process", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Send one message, without waiting for the process to read it. Raises nothing if the process is gone: its exit
        is reported to the listener.
        """
        if self._writer is not None:
            self._writer.send(message)

    def model_problem(self) -> str | None:
        """The reason why the process must not go on with its loaded model; None without one. Any thread may ask."""
        proof = self._proof
        return None if proof is None else proof.later_problem()

    def stop(self) -> None:
        """Kill the process. Its work in progress is lost; its finished rows were sent already."""
        self._is_stopped.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until the process and its threads are gone."""
        self._thread.join(timeout_s)
        if self._writer is not None:
            self._writer.join(timeout_s)

    def _live(self) -> None:
        reason = "it was stopped"
        try:
            model = self._find_model()
            if not self._is_stopped.is_set():
                reason = self._converse(self._start(), model)
        except Exception as error:
            self._listener(self, Fatal(str(error), is_permanent=isinstance(error, EngineError)))
            reason = "it could not be started"
        if self._spare is not None:
            self._spare.close()
        self._listener(self, reason)
        if self._proof is not None:
            self._proof.close()

    def _start(self) -> subprocess.Popen[bytes]:
        num_threads = self._settings.config.num_threads
        spare = self._spare.take(num_threads) if self._spare else None
        self.was_spare = spare is not None
        self._process = spare or start_engine_process(self._log_path, num_threads)
        if self._is_stopped.is_set():
            self._process.kill()
        return self._process

    def _converse(self, process: subprocess.Popen[bytes], model: Path) -> str:
        """Exchange messages with the process until it ends. Returns a clause that says how it ended."""
        assert process.stdout is not None, f"process {process.pid} has no pipe to read"
        assert process.stdin is not None, f"process {process.pid} has no pipe to write to"
        self._proof = proof = self._settings.proof_of(model)
        digest = _digest_of(proof)
        writer = FrameWriter(process.stdin)
        writer.send(Start(str(model), self._settings.factory, self._settings.config))
        self._writer = writer
        try:
            while (message := read_frame(process.stdout, FROM_ENGINE)) is not None:
                if isinstance(message, Ready):
                    # Other messages go on while the model is hashed for the first time on this host.
                    digest.add_done_callback(partial(self._prove, process, message))
                else:
                    self._listener(self, message)
        except MessageError as error:
            process.kill()
            self._listener(self, Fatal(f"it sent a malformed message: {error}"))
        code = process.wait()
        process.stdout.close()
        writer.close()
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"

    def _prove(self, process: subprocess.Popen[bytes], ready: Ready, digest: Future[str]) -> None:
        """Pass `Ready` on, or kill the process because it has not loaded the model that the settings name."""
        assert self._proof is not None, "a process is proven after it was started"
        try:
            problem = self._proof.problem(digest.result())
        except (OSError, ValueError) as error:
            problem = f"the base model's files cannot be read ({error})", False
        if problem is None:
            self._listener(self, ready)
            return
        text, is_permanent = problem
        self._listener(self, Fatal(text, is_permanent=is_permanent))
        process.kill()


def _digest_of(proof: ModelProof) -> Future[str]:
    """Future of the proof's digest, which a thread of its own computes while the engine loads."""
    found: Future[str] = Future()

    def compute() -> None:
        try:
            found.set_result(proof.digest())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=compute, name="hash of the model", daemon=True).start()
    return found


class FrameWriter:
    """Writes to a process's standard input in the order of `send`, in a thread of its own, and closes it at the end.

    A pipe takes 64 KiB; frames beyond that wait in memory until the process reads them. A write that blocks ends with
    the process. A process that is gone is no error: its exit is reported to the listener.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="engine writer", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Have a message written after those sent before it. Never waits."""
        self._outbox.put(encode_frame(TO_ENGINE, message))

    def close(self) -> None:
        """Close the stream once all is written. Never waits."""
        self._outbox.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the stream is closed or the process is gone, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self._stream.write(frame)
                self._stream.flush()
        # Closing the stream of a process that is gone fails if frames are left to flush.
        with contextlib.suppress(OSError):
            self._stream.close()
