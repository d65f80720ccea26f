"""`Location`: a folder at any fsspec URL. Files are listed, read and written whole: a reader never sees half a file.

Local folders and object stores have different atomic operations; the difference is handled here:

| | local | object store | SFTP |
|---|---|---|---|
| whole file | temporary name, fsync, rename | one PUT, or a multipart upload: seen when whole | temporary, rename |
| create only | temporary name, hard link | conditional PUT where the store has it | rename that replaces nothing |
| append | the file itself | one more object, `NAME.<number>-<random>`, read back in order | one more file |

The names of a journal's segments sort in the order of writing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import MissingFileError, StorageError, UnansweredError
from .limits import http_status, noted
from .redaction import redacted_url, storage_reason
from .urls import absolute

logger = logging.getLogger(__name__)
#: Protocols of servers where readers see a file that is being written, and a rename replaces another file at once.
RENAMING_PROTOCOLS = ("sftp://", "ssh://")
_BUCKET_PROTOCOLS = ("s3://", "s3a://", "gs://", "gcs://", "az://", "abfs://", "abfss://")


class Location:
    """One folder and all below it. Names are relative, with `/` between parts. Picklable.

    `scratch`: sub-folder for temporary files; it must be on the same file system as the rest.
    All methods raise `StorageError`; reading a missing file raises its subclass `MissingFileError`.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, scratch: str = "") -> None:
        self.url = url.rstrip("/") or url
        self.storage_options = options_for(url, storage_options or {})
        self.scratch = scratch

    def __repr__(self) -> str:
        return f"Location({redacted_url(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("url", "storage_options", "scratch")}

    @cached_property
    def _last_segments(self) -> dict[str, int]:
        """Journal -> number of its latest segment, for journals to which this process adds."""
        return {}

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return self._open()

    def _open(self) -> tuple[Any, str]:
        if (folder := local_folder(self.url)) is not None:
            return _LocalFiles(), folder
        from .stores import open_store  # takes a third of the time of `lorabatch status`

        with self._translated("open", ""):
            fs, root = open_store(self.url, self.storage_options)
        # An old listing would hide files that other processes have written since, also from other threads.
        if hasattr(fs, "dircache"):
            fs.dircache.use_listings_cache = False
        return fs, root.rstrip("/") or root

    @property
    def fs(self) -> Any:
        """The filesystem: `_LocalFiles` for a local folder, else fsspec's as `LimitedFiles`."""
        # A connection of SFTP is for one thread; fsspec keeps a filesystem for each.
        return (self._open() if self.url.startswith(RENAMING_PROTOCOLS) else self._opened)[0]

    @property
    def is_local(self) -> bool:
        """Whether files here can be renamed, appended to and memory-mapped."""
        if isinstance(self.fs, _LocalFiles):
            return True
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self.fs, LocalFileSystem)

    def path(self, name: str = "") -> str:
        """The filesystem's own path of a file here."""
        root = self._opened[1]
        return f"{root}/{name}" if name else root

    def local_path(self, name: str) -> Path:
        """The path of a local file; only for a location that `is_local`."""
        assert self.is_local, f"{self!r} is not a local folder"
        return Path(self.path(name))

    def list(self, folder: str = "") -> dict[str, int | None]:
        """Name directly under `folder` -> size in bytes, None for a sub-folder. Empty for a missing folder."""
        with self._translated("list", folder):
            self._forget(folder)
            try:
                entries = self.fs.ls(self.path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        names = {}
        for entry in entries:
            name = entry["name"].rstrip("/").rsplit("/", 1)[-1]
            is_marker = entry["name"].rstrip("/") == self.path(folder).rstrip("/")
            if not is_marker:
                names[name] = None if entry["type"] == "directory" else int(entry["size"] or 0)
        return names

    def exists(self, name: str) -> bool:
        """Whether the file exists now; no cached listing is used."""
        with self._translated("look for", name):
            self._forget(name)
            # `isfile` would take a store that refuses or does not answer for an empty one.
            try:
                return bool(self.fs.info(self.path(name))["type"] == "file")
            except (FileNotFoundError, NotADirectoryError):
                return False

    def check_folder(self) -> None:
        """Raise the error that a first write would: a missing bucket (stores list it as an empty one), a file in place
        of the folder or one above it, a local folder without permission to write.
        """
        if self.is_local:
            with self._translated("write to", ""):
                _check_writable(self.local_path(""))
            return
        bucket, slash, _ = self.path().partition("/")
        if slash and bucket and self.url.startswith(_BUCKET_PROTOCOLS):
            # A user who may write only below the bucket may not ask for the bucket itself.
            with self._translated("find the bucket of", ""), contextlib.suppress(PermissionError):
                self.fs.info(bucket)

    def read(self, name: str) -> bytes:
        """The whole file."""
        with self._translated("read", name):
            self._forget(name)
            return bytes(self.fs.cat_file(self.path(name)))

    def open(self, name: str, block_bytes: int | None = None) -> BinaryIO:
        """The file, for random access. `block_bytes`: bytes that a remote store sends beyond each read; None for those
        that its file system takes by itself, 5 MB to 50 MB.
        """
        with self._translated("read", name):
            self._forget(name)
            return cast(BinaryIO, self.fs.open(self.path(name), "rb", block_size=block_bytes))

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write or replace the whole file; after an error, the file is as it was."""
        with self._translated("write", name):
            if self.is_local:
                with self._temporary_file(data) as temporary:
                    self._rename(temporary, self.local_path(name))
            else:
                self._put(name, bytes(data))

    def overwrite(self, name: str, data: bytes) -> bool:
        """Write `data`, padded with blanks, into an existing local file that is long enough, which needs no room on the
        disk. False for other files. For small files only: a reader may see half of the data.
        """
        if not self.is_local:
            return False
        with self._translated("write", name), self.local_path(name).open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return len(data) <= size and file.write(data.ljust(size)) == size

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Write the whole file unless it exists. False when it did; then it stays as it is.

        Where the store has no conditional write, two writers at the same moment may both report True; the
        file is whole in any case.
        """
        with self._translated("write", name):
            if self.is_local:
                with self._temporary_file(data) as temporary:
                    return self._link(temporary, self.local_path(name))
            return self._conditional_put(name, bytes(data))

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a journal, whole or not at all. A reader may see a part of `data` at the end while it is
        written, and after a process that was killed while writing.
        """
        with self._translated("append to", name):
            if not self.is_local:
                folder, _, journal = name.rpartition("/")
                last = self._last_segments.get(name)
                last = last_segment(journal, self.list(folder)) if last is None else last
                segment, self._last_segments[name] = next_segment(journal, last, time.time_ns())
                self._put(f"{folder}/{segment}" if folder else segment, data)
                return
            path = self.local_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                _write_whole(file, data)

    def read_journal(self, name: str) -> bytes:
        """Everything appended under `name`, in order; empty without any."""
        folder, _, base = name.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        return b"".join(self.read(prefix + segment) for segment in segments_of(base, self.list(folder)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and whole folders; missing ones are ignored."""
        for name in names:
            with self._translated("remove", name), contextlib.suppress(FileNotFoundError):
                self._forget(name)
                self.fs.rm(self.path(name), recursive=True)

    def put(self, name: str, target: str) -> None:
        """Give the file `name` the name `target`, in place of another file there; a reader sees one of both, whole.
        An object store copies the file, and `name` stays until it is removed.
        """
        with self._translated("write", target):
            if self.is_local:
                self._rename(self.local_path(name), self.local_path(target))
                return
            self._forget(name)
            self._forget(target)
            put = self.fs.mv if self.url.startswith(RENAMING_PROTOCOLS) else self.fs.cp_file
            self._make_folders(*([self.path(target)] if self.url.startswith(RENAMING_PROTOCOLS) else []))
            put(self.path(name), self.path(target))

    def _conditional_put(self, name: str, data: bytes) -> bool:
        if self.exists(name):
            return False
        if self.url.startswith(RENAMING_PROTOCOLS):
            return self._put(name, data, is_new=True)
        try:
            self.fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, OSError) as error:
            if _is_lost_race(error):
                return False
            if not _is_unconditional(error):
                raise
            # A status for a missing feature may also mean that another writer was first.
            if self.exists(name):
                return False
            _warn_unconditional(self.url.split("://", 1)[0])
            self.fs.pipe_file(self.path(name), data)
        return True

    def _forget(self, name: str) -> None:
        """Drop fsspec's listings of this name and its folder: fsspec takes a name that an old listing lacks for
        missing.
        """
        path = self.path(name)
        for listed in (path, path.rpartition("/")[0]):
            self.fs.invalidate_cache(listed)

    def _put(self, name: str, data: bytes, *, is_new: bool = False) -> bool:
        """Write or replace a file that is not local. `is_new`: replace nothing. False when the file existed."""
        if not self.url.startswith(RENAMING_PROTOCOLS):
            self.fs.pipe_file(self.path(name), data)
            return True
        path, temporary = self.path(name), self.path(f"{self.scratch}/.{uuid.uuid4().hex}.tmp".lstrip("/"))
        self._make_folders(temporary, path)
        try:
            self.fs.pipe_file(temporary, data)
            if is_new:
                return self._rename_remote(temporary, name)
            self.fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(temporary)
            raise
        return True

    def _rename_remote(self, temporary: str, name: str) -> bool:
        """Rename over SFTP unless the new name is taken; False when it was. This is the protocol's own request, while
        `mv` sends POSIX's, which replaces files.
        """
        try:
            self.fs.ftp.rename(temporary, self.path(name))
        except OSError:
            if not self.exists(name):
                raise
            self.fs.rm_file(temporary)
            return False
        return True

    def _make_folders(self, *paths: str) -> None:
        for folder in {path.rpartition("/")[0] for path in paths}:
            try:
                self.fs.makedirs(folder, exist_ok=True)
            except OSError:
                # Another process may have made it at the same moment.
                if not self.fs.isdir(folder):
                    raise

    @contextlib.contextmanager
    def _temporary_file(self, data: bytes | memoryview) -> Iterator[Path]:
        folder = self.local_path(self.scratch)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{uuid.uuid4().hex}.tmp"
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    @staticmethod
    def _rename(temporary: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, target)
        _sync_folder(target.parent)

    @staticmethod
    def _link(temporary: Path, target: Path) -> bool:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError:
            # A file system without hard links (some network and FUSE mounts): the file is whole, but not exclusive.
            if target.exists():
                return False
            os.replace(temporary, target)
        _sync_folder(target.parent)
        return True

    @contextlib.contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        place = f"{self.url}/{name}" if name else self.url
        try:
            # A disk of another machine may block without limit.
            with noted(doing, place) if local_folder(self.url) is not None else contextlib.nullcontext():
                yield
        except StorageError:
            raise
        except Exception as error:
            where = redacted_url(place)
            kind = MissingFileError if isinstance(error, FileNotFoundError) else StorageError
            failed = kind(f"cannot {doing} {where}: {storage_reason(error, self.storage_options, self.url)}")
            failed.is_away = isinstance(error, UnansweredError)
            raise failed from None


class _LocalFiles:
    """The part of fsspec's filesystem interface that `Location` uses, for local folders."""

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """Name, type and size of each entry, as fsspec's `ls`. Raises FileNotFoundError and NotADirectoryError."""
        with os.scandir(path) as entries:
            return [self._described(entry.path, entry) for entry in entries]

    def info(self, path: str) -> dict[str, Any]:
        """Name, type and size of a file or folder, as fsspec's `info`. Raises FileNotFoundError."""
        return self._described(path, Path(path))

    def cat_file(self, path: str) -> bytes:
        """The content of a file."""
        return Path(path).read_bytes()

    def open(self, path: str, mode: str = "rb", block_size: int | None = None) -> BinaryIO:
        """The open file; `block_size` does nothing."""
        return cast(BinaryIO, open(path, mode))

    def rm(self, path: str, recursive: bool = False) -> None:
        """Remove a file, or a folder and all below it. Raises FileNotFoundError."""
        if recursive and os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    def invalidate_cache(self, path: str) -> None:
        """Does nothing: this class has no cache."""

    @staticmethod
    def _described(path: str, file: os.DirEntry[str] | Path) -> dict[str, Any]:
        try:
            found = file.stat()
        except FileNotFoundError:  # a link to nothing has a status of its own; a missing file raises again
            found = os.lstat(path)
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "file" if stat.S_ISREG(found.st_mode) else "other"
        return {"name": path, "type": kind, "size": found.st_size}


def local_folder(url: str) -> str | None:
    """The absolute path of a URL without a protocol or with the local one; None for other URLs."""
    protocol, separator, path = url.rpartition("://")
    if "::" in url or (separator and protocol not in ("file", "local")):
        return None
    return path if path.startswith("/") else absolute(path)


def options_for(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options meant for this URL: `{"s3": {…}, "gs": {…}}` is one mapping per protocol."""
    if not storage_options:
        return {}
    from fsspec import available_protocols

    protocol = url.split("://", 1)[0].split("::", 1)[0] if "://" in url else "file"
    is_per_protocol = all(
        isinstance(value, Mapping) and key in available_protocols() for key, value in storage_options.items()
    )
    if is_per_protocol:
        return dict(storage_options.get(protocol, {}))
    return {} if protocol in ("file", "local") else dict(storage_options)


def _is_lost_race(error: Exception) -> bool:
    """Whether a store's refusal means that another writer was first (HTTP 412 or 409)."""
    text = str(error)
    known = any(code in text for code in ("PreconditionFailed", "ConditionalRequestConflict", "412"))
    return known or http_status(error) in (409, 412)


def _is_unconditional(error: Exception) -> bool:
    """Whether an error means that the store, or its filesystem package, has no conditional writes: HTTP 501, or 400 in
    a plain OSError, where only the condition can be wrong (credentials and time limits have classes of their own).
    """
    if isinstance(error, NotImplementedError | TypeError) or "NotImplemented" in str(error):
        return True
    return (type(error) is OSError and http_status(error) in (400, 501)) or _errno(error) == errno.ENOSYS


def _errno(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None


@cache
def _warn_unconditional(protocol: str) -> None:
    """Logs once per process and protocol."""
    logger.warning(
        "%s: this store has no conditional writes; when two workers finish the same shard, the later part replaces the "
        "earlier one, with the same rows",
        protocol,
    )


def _write_whole(file: FileIO, data: bytes) -> None:
    """Append all of `data`, or remove the piece that was written: a nearly full disk writes less than it is given. The
    torn piece stays if another process has appended behind it meanwhile.
    """
    num_written = 0
    try:
        while num_written < len(data):
            num_written += file.write(data[num_written:])
    except OSError:
        if num_written and (end := file.tell()) == os.fstat(file.fileno()).st_size:
            file.truncate(end - num_written)
        raise


def _check_writable(folder: Path) -> None:
    """Raise OSError unless the folder can be written to, or created."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if os.access(there, os.W_OK | os.X_OK):
        return
    code = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    raise OSError(code, os.strerror(code), str(there))


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def segments_of(journal: str, names: Iterable[str]) -> list[str]:
    """The names in a folder that hold a part of this journal, in order."""
    return sorted(name for name in names if name == journal or name.startswith(f"{journal}."))


def last_segment(journal: str, names: Iterable[str]) -> int:
    """The highest number of a segment of this journal among the names in its folder; 0 without any."""
    return max((_number(journal, name) for name in segments_of(journal, names)), default=0)


def next_segment(journal: str, last: int, now_ns: int) -> tuple[str, int]:
    """Name and number of a journal's segment after the one with the number `last`. `journal`: name without folder.

    Segments are numbered by the clock, but always above those that existed before: a coordinator that takes over may
    have a clock that is behind.
    """
    number = max(now_ns, last + 1)
    return f"{journal}.{number:020d}-{uuid.uuid4().hex[:8]}", number


def _number(journal: str, segment: str) -> int:
    digits = segment[len(journal) + 1 :].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
