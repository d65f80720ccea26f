"""`Target`, and `run_case`: runs one case of it and says what is wrong with the outcome.

The outcome is a value or one of the reader's own refusals, within limits of computing time and memory, and all text
that a user would see is short and has no control characters.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from lorabatch.system.untrusted import printable

CPU_S = 20.0
MEMORY_BYTES = 1 << 30
_MAX_CHARACTERS = 100_000


Case = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """One kind of data. `refusals`: how its reader may end, beside with a value. `num_examples`: of the short form."""

    name: str
    cases: Callable[[], SearchStrategy[Case]]
    read: Callable[[Path], Iterator[str]]
    refusals: tuple[type[BaseException], ...]
    num_examples: int = 100


class TooLongError(KeyboardInterrupt):
    """The case took more than `CPU_S`; an interruption, which no handler takes for a fault of the data."""


class PropertyError(AssertionError):
    """A reader's outcome is not what it may be."""


@dataclass(frozen=True)
class Cost:
    """What a case took of this process. `peak_bytes`: above what it had before."""

    cpu_s: float
    peak_bytes: int


def run_case(target: Target, case: Case, folder: Path) -> Cost:
    """Give the case to the target's reader, its files in `folder`. Raises `PropertyError`, `TooLongError`, or what the
    reader should not have raised."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in case.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    _reset_peak()
    before_bytes, before_s = _memory("VmRSS"), time.process_time()
    with _limited():
        try:
            for text in target.read(folder):
                _check_text(text)
        except target.refusals as refusal:
            _check_refusal(str(refusal))
    cost = Cost(time.process_time() - before_s, max(0, _memory("VmHWM") - before_bytes))
    if cost.peak_bytes > MEMORY_BYTES:
        raise PropertyError(f"{cost.peak_bytes >> 20} MiB of memory")
    return cost


def _check_text(text: str) -> None:
    if printable(text) != text:
        raise PropertyError(f"control characters in {text[:300]!a}")
    if len(text) > _MAX_CHARACTERS:
        raise PropertyError(f"a text of {len(text)} characters: {text[:300]!a}")


def _check_refusal(text: str) -> None:
    _check_text(text)
    if ":" not in text and " " not in text:
        raise PropertyError(f"a refusal that does not say what is wrong: {text!r}")


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError(f"more than {CPU_S:g} s of computing")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0
