"""Streams one file at any fsspec URL: `read_lines` reads it, `replaced_file` and `put_file` write it whole or not at
all.

`Location` reads and writes files that fit into memory; files here need not.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...system.local_cache import temporary_folder
from ..errors import JobError, StorageError
from .location import RENAMING_PROTOCOLS, Location
from .redaction import redacted_url, storage_reason

_BUFFER_BYTES = 1 << 20


def read_lines(url: str, storage_options: Mapping[str, Any], max_bytes: int) -> Iterator[bytes | None]:
    """The lines of a file, with their ends; None for a line of more than `max_bytes`, which bounds the memory.

    Raises `StorageError`.
    """
    location = Location(url, storage_options)
    with location.open("") as opened, io.BufferedReader(cast(io.RawIOBase, opened), _BUFFER_BYTES) as file:
        try:
            while line := file.readline(max_bytes + 1):
                if len(line) <= max_bytes:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = file.readline(max_bytes)
                yield None
        except StorageError:
            raise
        except Exception as error:
            reason = storage_reason(error, location.storage_options, url)
            raise StorageError(f"cannot read {redacted_url(url)}: {reason}") from None


@contextmanager
def replaced_file(url: str, storage_options: Mapping[str, Any]) -> Iterator[BinaryIO]:
    """A new file that replaces the file at `url` when the block ends well; after an error, that file stays as it was.
    Until it is whole, the new file is on a disk of this machine.

    Raises `StorageError`.
    """
    location = Location(url, storage_options)
    try:
        with _new_file(location) as path:
            with path.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _put(path, location)
    except JobError:
        raise
    except OSError as error:
        reason = storage_reason(error, location.storage_options, url)
        raise StorageError(f"cannot write {redacted_url(url)}: {reason}") from None


def put_file(path: Path, url: str, storage_options: Mapping[str, Any]) -> None:
    """Copy a file of this machine to a URL of a store, whole or not at all. Raises `StorageError`."""
    _put(path, Location(url, storage_options))


@contextmanager
def _new_file(location: Location) -> Iterator[Path]:
    """A path for the new file, from which it can be put in place; the file is removed with the block."""
    if not location.is_local:
        with temporary_folder(prefix="file-") as folder:
            yield folder / "file"
        return
    target = location.local_path("")
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _put(path: Path, location: Location) -> None:
    """Put the file at its location, whole. Raises `StorageError`, and `OSError` of the local disk."""
    if location.is_local:
        os.replace(path, location.local_path(""))
        return
    fs, target = location.fs, location.path()
    is_renamed = location.url.startswith(RENAMING_PROTOCOLS)
    seen = f"{target.rpartition('/')[0]}/.{uuid.uuid4().hex}.tmp" if is_renamed else target
    try:
        if is_renamed:
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(path), seen)
        if is_renamed:
            fs.mv(seen, target)
    except Exception as error:
        if is_renamed:
            with suppress(Exception):
                fs.rm_file(seen)
        reason = storage_reason(error, location.storage_options, location.url)
        raise StorageError(f"cannot write {redacted_url(location.url)}: {reason}") from None
