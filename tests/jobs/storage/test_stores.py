"""Filesystems of fsspec whose calls differ from those of its own base class, as those of Azure do."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem, sync

from lorabatch.jobs.errors import UnansweredError
from lorabatch.jobs.storage.stores import LimitedFile, LimitedFiles


class OwnCalls(AsyncFileSystem):  # type: ignore[misc]
    """Files in memory. Some calls are the class's own, and take a path and nothing else."""

    protocol = "own-calls"
    cachable = False
    files: dict[str, bytes]
    is_silent = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.files = {}

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        if self.is_silent:
            await asyncio.sleep(60)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.files[path] = value

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        return self.files[path][start:end]

    async def _rm_file(self, path: str, **options: Any) -> None:
        del self.files[path]

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def isdir(self, path: str) -> bool:
        return bool(sync(self.loop, self._isdir, path))


@pytest.fixture
def files() -> LimitedFiles:
    return LimitedFiles(OwnCalls(), {"limit_s": 0.5})


def test_calls_that_take_no_limit_are_limited_all_the_same(files: LimitedFiles) -> None:
    files.makedirs("place", exist_ok=True)
    files.pipe_file("place/a", b"some")
    assert [files.isfile("place/a"), files.isfile("place"), files.isdir("place"), files.isdir("elsewhere")] == [
        True, False, True, False,
    ]  # fmt: skip
    assert (files.info("place/a")["size"], files.cat_file("place/a")) == (4, b"some")
    files.rm_file("place/a")
    assert not files.exists("place/a")


@pytest.mark.parametrize("look", ["isfile", "isdir", "exists", "info"])
def test_a_look_at_a_store_that_does_not_reply_ends(files: LimitedFiles, look: str) -> None:
    files.store.is_silent = True
    call: Callable[[str], Any] = getattr(files, look)
    with pytest.raises(UnansweredError, match="no reply within"):
        call("place/a")


def test_a_store_that_refuses_is_not_taken_for_one_without_the_file(
    files: LimitedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(path: str, **options: Any) -> dict[str, Any]:
        raise PermissionError(path)

    monkeypatch.setattr(files.store, "_info", refuse)
    with pytest.raises(PermissionError):
        files.isfile("place/a")


def test_a_file_says_where_it_is_although_its_library_does_not() -> None:
    class Silent(io.BytesIO):
        def seek(self, offset: int, whence: int = 0) -> None:  # type: ignore[override]
            super().seek(offset, whence)

    file = LimitedFile(Silent(b"some bytes"), "sftp://host/file", {})
    assert [file.seek(0, io.SEEK_END), file.seek(2), file.seek(3, io.SEEK_CUR)] == [10, 2, 5]
    assert file.read(3) == b"byt"
