"""`AdapterCopies`: local copies of adapters in a store, shared by the workers of a host, within a limit of bytes.

Copies are folders of one folder of the cache. A process that needs some holds them: their names stand in a file of its
own, whose lock says that the process lives. Copies that no process holds are removed, the one used longest ago first,
when another one needs room.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ...system.local_cache import default_cache_root, file_lock, make_private

T = TypeVar("T")
_FOLDER = "adapter-copies"
_HELD, _GONE, _IDENTITY = ".held-", ".gone-", ".identity"
# Share of the room on a disk that copies may take where no limit is given.
_SHARE_OF_ROOM = 0.5


class AdapterCopies:
    """The copies of one cache, as one process uses them. `limit_bytes`: most bytes of all copies, None for half of the
    room that the disk has beside other files. What is held may be more. Any thread may call.
    """

    def __init__(self, cache_root: Path | None = None, limit_bytes: int | None = None) -> None:
        #: Folder of all copies.
        self.root = (cache_root or default_cache_root()) / _FOLDER
        make_private(self.root)
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._limit_bytes = limit_bytes
        self._descriptor, self._path = tempfile.mkstemp(prefix=_HELD, dir=self.root)
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    @cached_property
    def identity(self) -> str:
        """A random name, the same in all processes that share these copies; "" where there is no room for it."""
        path = self.root / _IDENTITY
        with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=self.root, prefix=_GONE) as made:
            made.write(secrets.token_hex(16))
            made.flush()
            with suppress(FileExistsError):
                os.link(made.name, path)
            return path.read_text(encoding="ascii")
        return ""

    @property
    def limit_bytes(self) -> int:
        """Most bytes of all copies."""
        if self._limit_bytes is None:
            room = shutil.disk_usage(self.root).free + self.num_bytes
            self._limit_bytes = int(_SHARE_OF_ROOM * room)
        return self._limit_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies of the host."""
        return sum(self._size(name) for name in self._names())

    def hold(self, folders: Iterable[Path]) -> list[Path]:
        """Keep copies until they are released as often as they were held. Folders elsewhere are none. Returns those
        that are not there any more, which are not held.
        """
        missing = []
        with self._lock, file_lock(self.root / ".lock"):
            for folder in folders:
                if folder.parent != self.root:
                    continue
                if not folder.is_dir():
                    missing.append(folder)
                    continue
                os.utime(folder)
                self._held[folder.name] += 1
            self._write_held()
        return missing

    def put(self, source: Path, folder: Path) -> None:
        """Rename a folder so that it is the copy `folder`, and hold it, before others may remove it to make room."""
        with self._lock, file_lock(self.root / ".lock"):
            os.rename(source, folder)
            self._held[folder.name] += 1
            self._write_held()

    def release(self, folders: Iterable[Path], *, is_done: bool = True) -> None:
        """Let copies go that were held, and remove copies until all are within the limit. `is_done` false: they are
        held again at once, and nothing is removed.
        """
        # within the lock of all processes: another one must not read the names while they are written
        with self._lock, file_lock(self.root / ".lock"):
            for folder in folders:
                if folder.parent != self.root:
                    continue
                self._held[folder.name] -= 1
                with suppress(FileNotFoundError):
                    os.utime(folder)
            self._held = +self._held
            self._write_held()
        if is_done:
            self._make_room(self.limit_bytes)

    def with_room(self, num_bytes: int, copy: Callable[[], T]) -> T:
        """Make room for a copy of `num_bytes`, and call `copy`; once more with the room of all copies that no process
        holds, where the disk is full. Raises what `copy` raises.
        """
        self._make_room(self.limit_bytes - num_bytes)
        try:
            return copy()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room(0):
                raise
        return copy()

    def close(self) -> None:
        """Let all copies go, and remove copies until all are within the limit. What is released later changes
        nothing.
        """
        with suppress(OSError):
            with self._lock:
                descriptor, self._descriptor = self._descriptor, -1
                self._held.clear()
                os.unlink(self._path)
                os.close(descriptor)
            self._make_room(self.limit_bytes)

    def _make_room(self, limit_bytes: int) -> int:
        """Remove copies that no process holds, until the others have at most `limit_bytes`. Returns how many."""
        num_removed = 0
        if self.num_bytes <= limit_bytes:
            return 0
        with self._lock, file_lock(self.root / ".lock"):
            held, total = self._held_by_all(), self.num_bytes
            for name in sorted(self._names() - held, key=self._used_at):
                if total <= limit_bytes:
                    break
                total -= self._size(name)
                gone = Path(tempfile.mkdtemp(prefix=_GONE, dir=self.root))
                with suppress(OSError):
                    os.rename(self.root / name, gone / name)
                    num_removed += 1
                shutil.rmtree(gone, ignore_errors=True)
        return num_removed

    def _names(self) -> set[str]:
        with suppress(FileNotFoundError):  # the user may empty the cache
            return {entry.name for entry in os.scandir(self.root) if not entry.name.startswith(".")}
        return set()

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            with suppress(OSError):
                self._sizes[name] = sum(entry.stat().st_size for entry in os.scandir(self.root / name))
        return self._sizes.get(name, 0)

    def _used_at(self, name: str) -> int:
        with suppress(OSError):
            return (self.root / name).stat().st_mtime_ns
        return 0

    def _write_held(self) -> None:
        if self._descriptor < 0:  # closed: the number may be another file's by now
            return
        text = json.dumps(sorted(self._held)).encode()
        with suppress(OSError):  # a full disk has room for what was there
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def _held_by_all(self) -> set[str]:
        """Names of copies that some process holds. Files of processes that are gone are removed."""
        held = set(self._held)
        for path in self.root.glob(f"{_HELD}*"):
            if str(path) == self._path:
                continue
            with suppress(OSError), path.open("r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    try:
                        held.update(json.loads(file.read() or b"[]"))
                    except ValueError:  # a full disk took a part of the names: it may be any of them
                        held |= self._names()
                else:
                    path.unlink()
        return held
