"""A file of this machine for what is too much for memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ..jobs.errors import StorageError


class ScratchFile:
    """Without a name: it goes with the process. Raises `StorageError` where its folder has no room."""

    def __init__(self) -> None:
        with _told():
            self._file = tempfile.TemporaryFile("w+b", buffering=0, prefix="lorabatch-")  # noqa: SIM115, see `close`

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give its room back."""
        self._file.close()

    def write(self, data: bytes | memoryview, place: int | None = None) -> int:
        """Write all of it, at the end or at `place`, in bytes. Returns where it begins."""
        with _told():
            start = self._file.seek(0, 2) if place is None else self._file.seek(place)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            return start

    def read(self, place: int = 0, size: int = -1) -> bytearray:
        """So many bytes from `place`, or all that are there."""
        with _told():
            size = self._file.seek(0, 2) - place if size < 0 else size
            self._file.seek(place)
            data = bytearray(size)
            rest = memoryview(data)
            while rest:
                count = self._file.readinto(rest)
                if not count:
                    raise EOFError(f"{len(rest)} bytes are missing at {place}")
                rest = rest[count:]
            return data


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"temporary folder {tempfile.gettempdir()}: {error.strerror or error}. A job is planned in files there, "
            "some 100 bytes a row; give it room, or set TMPDIR for the workers to a folder that has some."
        ) from None
