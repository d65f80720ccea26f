"""Runs small tasks on untrusted data in a child process with limits of CPU time and memory.

For what a stranger's data can make endless or enormous where nothing cheaper bounds it, and for what libraries read
that it may crash: adapter folders, regular expressions that backtrack, chat templates. A child that breaks a limit, or
crashes, is replaced.

A task is a function `run(payload)` of a module of lorabatch; payload and answer are JSON. CPU time is limited, not time
on the clock, so that a busy machine refuses no data. The child ends when its standard input closes.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .untrusted import NoProcessError, printable, shortened

MEMORY_BYTES = 3 << 30
_PACKAGE = __package__.rpartition(".")[0]
# One thread and one arena, since address space is limited.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_MAX_MESSAGE_CHARACTERS = 500
_LEAVING_S = 5.0
_READY = b"ready\n"
# Option of prctl(2): the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def python_command(module: str, *arguments: str) -> list[str]:
    """The command of a Python process that runs a module of lorabatch.

    The working directory is not on its path: a `numbers.py` or `tokenizers` in a user's folder would be imported in
    place of the module of that name. Only if lorabatch itself is imported from there, it stays on the path.
    """
    is_there = Path(__file__).absolute().parents[2] == Path.cwd()
    return [sys.executable, *([] if is_there else ["-P"]), "-m", module, *arguments]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, stopped or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class ConfinedError(Exception):
    """The task broke a limit, or raised: the message says which, as a clause."""


class ConfinedProcess:
    """The child process. Safe to share between threads, which take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._is_closed = False

    def run(self, task: str, payload: Any, cpu_s: int, memory_bytes: int = MEMORY_BYTES) -> Any:
        """Return what `run(payload)` of the module `task` (below `lorabatch`) returns. Values of the payload that JSON
        has no word for, such as dates, arrive as text. `memory_bytes`: address space for the task, beside what the
        child has already.

        Raises `ConfinedError`, and `NoProcessError` when the machine cannot start the child.
        """
        try:
            question = json.dumps([task, payload, cpu_s, memory_bytes], default=str).encode()
        except RecursionError:
            raise ConfinedError("it nests too deeply") from None
        with self._turn:
            answer, code = self._asked(question)
            if code == -signal.SIGKILL and not self._is_closed:
                # A machine that runs out of memory kills its largest process, which may be no fault of the data: try
                # once more.
                answer, code = self._asked(question)
        if code is not None:
            raise ConfinedError(_how_it_ended(code, cpu_s, memory_bytes))
        kind, value = json.loads(answer)
        if kind == "unable":
            raise _no_process(value)
        if kind == "no process":
            raise NoProcessError(value)
        if kind == "error":
            raise ConfinedError(value)
        return value

    def close(self) -> None:
        """End the child, even in the middle of a task: the caller that waits for its answer gets `ConfinedError`."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._turn:
            self._end()

    def _asked(self, question: bytes) -> tuple[bytes, int | None]:
        """The child's answer, or the exit code of a child that ended instead."""
        process = self._alive()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:
            # Interrupted between question and answer: the next question must not get this answer.
            self._end()
            raise
        return answer, (None if answer.endswith(b"\n") else self._end())

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        try:
            self._process = subprocess.Popen(
                python_command(f"{_PACKAGE}.system.confinement"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C reaches the whole foreground group; the parent decides
            )
        except OSError as error:
            raise _no_process(error.strerror or str(error)) from None
        assert self._process.stdout is not None
        if self._process.stdout.readline() != _READY:
            raise _no_process(f"it ends at once, exit code {self._end()}")
        return self._process

    def _end(self) -> int:
        """End the child and return its exit code; negative for a signal that ended it before this call did."""
        process, self._process = self._process, None
        if process is None:
            return 0
        # The child ends by itself when its input closes, unless it is busy.
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            code = process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        return code


def _no_process(reason: str) -> NoProcessError:
    return NoProcessError(
        f"cannot start the process in which adapters, patterns and templates are read ({reason}). This machine lacks "
        "memory, or may start no more processes: free some, or raise the limit."
    )


def _how_it_ended(code: int, cpu_s: int, memory_bytes: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it takes more than {cpu_s} s of computing"
    if code == -signal.SIGKILL:
        return "the process that reads it was killed from outside, as by a machine that runs out of memory"
    return f"{_needs_more(memory_bytes)}, or crashes what reads it (exit code {code})"


def _needs_more(memory_bytes: int) -> str:
    return f"it needs more than {memory_bytes >> 30} GiB of memory"


@cache
def confined() -> ConfinedProcess:
    """The child of this process; it starts with its first task."""
    process = ConfinedProcess()
    atexit.register(process.close)
    # A forked process is not the parent of this one's child.
    os.register_at_fork(after_in_child=confined.cache_clear)
    return process


def _serve() -> None:
    """Say that it is ready; then answer one line with one line until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries may print to standard output: it becomes standard error, and answers get a descriptor of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(line: bytes) -> None:
        answers.write(line)
        answers.flush()

    answer(_READY)
    for line in sys.stdin.buffer:
        task, payload, cpu_s, memory_bytes = json.loads(line)
        # the limit of the task before is not for what this one imports: torch for CUDA maps 3 GB
        _limit(resource.RLIMIT_AS, None)
        try:
            run = import_module(f"{_PACKAGE}.{task}").run
        except Exception as error:
            answer(json.dumps(["unable", _shown_error(error)]).encode() + b"\n")
            return
        _limit(resource.RLIMIT_AS, _address_bytes() + memory_bytes)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)
        try:
            outcome = json.dumps(["answer", run(payload)])
        except MemoryError:
            outcome = json.dumps(["error", _needs_more(memory_bytes)])
        except NoProcessError as error:
            outcome = json.dumps(["no process", str(error)])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            outcome = json.dumps(["error", _shown_error(error)])
        answer(outcome.encode() + b"\n")


def _address_bytes() -> int:
    """Address space of this process in bytes: its modules, and what earlier tasks have left. 0 where it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit(kind: int, amount: int | None) -> None:
    """Limit a resource of this process to `amount`, or to the user's own limit where that is lower or `amount` None."""
    _, most = resource.getrlimit(kind)
    if amount is None:
        amount = most
    resource.setrlimit(kind, (amount if most == resource.RLIM_INFINITY else min(amount, most), most))


def _shown_error(error: BaseException) -> str:
    return shortened(printable(f"{type(error).__name__}: {error}"), _MAX_MESSAGE_CHARACTERS)


if __name__ == "__main__":
    _serve()
