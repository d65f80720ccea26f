"""The cache and the temporary files of this user on this machine: where they are, who may read them, locks among the
processes that fill the cache, and folders that go with their process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def default_cache_root() -> Path:
    """Default folder of converted models: `$XDG_CACHE_HOME/lorabatch`, or `~/.cache/lorabatch`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lorabatch"


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, for this user only. Folders that exist keep their permissions."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def scratch_folder(parent: Path | str | None = None) -> Path:
    """A folder for temporary files that no other user may enter, below `parent`, by default the system's folder for
    temporary files.
    """
    parent = Path(parent or tempfile.gettempdir())
    name = f"lorabatch-{os.getuid()}"
    parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (parent / name).mkdir(mode=0o700)
    # Another user may have taken the name.
    for folder in (parent / name, *sorted(parent.glob(f"{name}-*"))):
        with suppress(FileNotFoundError):
            facts = folder.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077:
                return folder
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))


@contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = "process-") -> Iterator[Path]:
    """A new folder that is removed with the block, below `parent`, by default `scratch_folder()`. Folders of this
    prefix that killed processes have left in `parent` are removed first.
    """
    parent = scratch_folder() if parent is None else parent
    with suppress(OSError):
        _remove_left(parent, prefix)
    folder, descriptor = _held_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _held_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds its lock if locks can be had. The lock says that the process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process removes the folder if it finds it before it is locked.
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, folder):
                return folder, descriptor
            os.close(descriptor)


def _remove_left(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that are gone."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, folder):
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of this name within the block; other processes and threads wait. The file exists only meanwhile.
    The operating system ends a lock with the process that holds it.

    If no lock can be had (a file system without them, a folder of another user), the block runs without one.
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
    """Whether an open file is still the one at `path`; it is not when the former holder of the lock has removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    # The file is removed while it is still locked: a process that has opened it by now finds it gone, and opens the
    # next.
    with suppress(OSError):
        path.unlink()
    # A process forked meanwhile holds the file open too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
