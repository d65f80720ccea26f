"""Locks files among the processes of this machine: the operating system ends a lock with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def default_cache_root() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/lorabatch`, or `~/.cache/lorabatch`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lorabatch"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this name within the block; other processes and threads wait. The file is there meanwhile only.

    Where no lock can be had (a file system without them, a folder of another user) the block runs without one.
    """
    descriptor = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    try:
        yield
    finally:
        if descriptor is not None:
            _release(path, descriptor)


def _locked(path: Path) -> int:
    """An open and locked file that is the one at `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`: who held the lock before has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    # While it is still locked: a process that has opened it by now finds it gone, and opens the next.
    with suppress(OSError):
        path.unlink()
    # A process forked meanwhile holds the file open too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
