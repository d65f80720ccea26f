"""The cache of this user on this machine: where it is, who may read it, and locks among the processes that fill it."""

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


def make_private(folder: Path) -> None:
    """Create a folder and what is missing above it, for this user only. What is there keeps its permissions."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this name within the block; other processes and threads wait. The file is there meanwhile only.
    The operating system ends a lock with the process that holds it.

    Where no lock can be had (a file system without them, a folder of another user) the block runs without one.
    """
    descriptor = None
    with suppress(OSError):
        make_private(path.parent)
        descriptor = _locked(path)
    try:
        yield
    finally:
        if descriptor is not None:
            _release(path, descriptor)


def _locked(path: Path) -> int:
    """An open and locked file that is the one at `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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
