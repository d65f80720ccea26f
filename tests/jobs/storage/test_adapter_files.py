"""Files of adapters in a store: versions from listings, headers alone, copies of one version."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save

from lorabatch.engine.errors import AdapterRefusedError
from lorabatch.engine.peft.tensor_file import read_header
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.storage import adapter_files
from lorabatch.jobs.storage.adapter_copies import AdapterCopies
from lorabatch.jobs.storage.adapter_files import (
    Alike,
    fetched_adapter,
    from_store,
    read_files,
    read_headers,
    versions_at,
)

WEIGHTS = "adapter_model.safetensors"
URL = "memory://headers/adapters/one"


def put(name: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"/headers/adapters/{name}", content)


def weights(num_tensors: int = 3, rows: int = 64) -> bytes:
    return save({f"tensor.{i}": np.full((rows, 8), i, np.float32) for i in range(num_tensors)})


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    put(f"one/{WEIGHTS}", weights())
    put("one/adapter_config.json", b'{"r": 8}')
    put("one/optimizer.pt", bytes(1000))
    put("one/checkpoint-5/adapter_config.json", b"{}")
    yield
    fsspec.filesystem("memory").rm("/headers", recursive=True)


class Counted:
    """The bytes that are read of each file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[str, int]] = []
        cls: Any = type(fsspec.filesystem("memory"))
        cat_file = cls.cat_file

        def counted(fs: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
            data: bytes = cat_file(fs, path, start=start, end=end, **more)
            self.reads.append((path.rpartition("/")[2], len(data)))
            return data

        monkeypatch.setattr(cls, "cat_file", counted)


def test_a_folder_of_headers_says_what_the_whole_folder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"one/{WEIGHTS}", weights(rows=8192))
    versions = versions_at([URL], {})[URL]
    assert set(versions) == {WEIGHTS, "adapter_config.json", "optimizer.pt"}
    assert read_files(versions) == ["adapter_config.json", WEIGHTS]
    counted = Counted(monkeypatch)
    read_headers(URL, versions, {}, tmp_path)
    assert counted.reads == [("adapter_config.json", 8), (WEIGHTS, 64 << 10)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / WEIGHTS).write_bytes(weights(rows=8192))
    assert read_header(tmp_path / WEIGHTS).tensors == read_header(tmp_path / "whole" / WEIGHTS).tensors
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == {"r": 8}
    assert (tmp_path / "optimizer.pt").stat().st_size == 1000


def test_a_long_header_takes_one_more_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = weights(num_tensors=1500, rows=1)
    length = 8 + int.from_bytes(content[:8], "little")
    put(f"one/{WEIGHTS}", content)
    counted = Counted(monkeypatch)
    read_headers(URL, versions_at([URL], {})[URL], {}, tmp_path)
    assert [num for name, num in counted.reads if name == WEIGHTS] == [64 << 10, length - (64 << 10)]
    assert len(read_header(tmp_path / WEIGHTS).tensors) == 1500


def test_headers_of_adapters_that_were_trained_alike_are_read_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"one/{WEIGHTS}", weights(rows=8192))
    alike = Alike()
    versions = versions_at([URL], {})[URL]
    read_headers(URL, versions, {}, tmp_path, alike)
    counted = Counted(monkeypatch)
    digests = {read_headers(URL, versions, {}, tmp_path, alike) for _ in range(2)}
    length = 8 + int.from_bytes(weights(rows=8192)[:8], "little")
    assert [num for name, num in counted.reads if name == WEIGHTS] == [length, length]
    assert digests == {read_headers(URL, versions, {}, tmp_path)}


def version_of(content: bytes) -> str:
    return f"{len(content)} {hashlib.md5(content).hexdigest()}"


def test_files_of_one_version_are_read_once_by_however_many_threads() -> None:
    alike, contents, reads = Alike(), [b"one", b"other"] * 20, Counter[bytes]()

    def read(content: bytes) -> bytes:
        reads[content] += 1
        time.sleep(0.05)
        return content

    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda content: alike.read(version_of(content), lambda: read(content)), contents)
        assert list(found) == contents
    assert reads == {b"one": 1, b"other": 1}


@pytest.mark.parametrize("fault", ["an error", "half of it"])
def test_a_file_that_is_not_read_whole_costs_no_other_of_its_version_anything(fault: str) -> None:
    alike, begun, may_end = Alike(), threading.Event(), threading.Event()

    def torn() -> bytes:
        begun.set()
        may_end.wait(60)
        if fault == "an error":
            raise OSError("the store is away")
        return b"o"

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(alike.read, version_of(b"one"), torn)
        assert begun.wait(60)
        second = threads.submit(alike.read, version_of(b"one"), lambda: b"one")
        may_end.set()
        assert second.result(60) == b"one"
        assert (first.exception(60) is not None) == (fault == "an error")
    assert alike.read(version_of(b"one"), lambda: b"one") == b"one"


@pytest.mark.parametrize("version", ["3 at 2026-11-30", "", f"{1 << 20} {'0' * 32}"])
def test_versions_that_do_not_follow_from_the_content_and_large_files_are_read_each(version: str) -> None:
    alike = Alike()
    assert [alike.read(version, lambda i=i: b"%d" % i) for i in range(3)] == [b"0", b"1", b"2"]  # type: ignore[misc]


@pytest.mark.parametrize("content", [b"", b"abc", (1 << 50).to_bytes(8, "little") + bytes(100), weights()[:-5]])
def test_a_damaged_file_is_refused_by_its_header(tmp_path: Path, content: bytes) -> None:
    put(f"one/{WEIGHTS}", content)
    read_headers(URL, versions_at([URL], {})[URL], {}, tmp_path)
    with pytest.raises(AdapterRefusedError, match="not a whole safetensors file"):
        read_header(tmp_path / WEIGHTS)


def test_adapters_of_one_parent_are_listed_together_and_alike() -> None:
    urls = [f"memory://headers/adapters/{number}" for number in range(12)]
    for number in range(12):
        put(f"{number}/{WEIGHTS}", weights())
        put(f"{number}/adapter_config.json", b"{}")
    together = versions_at(urls, {})
    assert together == {url: found for one in urls for url, found in versions_at([one], {}).items()}
    assert len(together) == 12


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter.gguf", "readme.md"])
def test_other_formats_are_left_to_whole_copies(name: str) -> None:
    put(f"two/{name}", b"content")
    put("two/adapter_config.json", b"{}")
    assert versions_at(["memory://headers/adapters/two", "/a/path", "org/name", "memory://headers/none"], {}) == {}


def test_a_copy_has_the_versions_that_were_asked_for_or_is_none(tmp_path: Path) -> None:
    versions, copies = versions_at([URL], {})[URL], AdapterCopies(tmp_path)
    wanted = {name: versions[name] for name in read_files(versions)}

    def fetch(folder: Path) -> None:
        from_store(URL, wanted, {}, folder)

    put(f"one/{WEIGHTS}", weights(rows=65))
    with pytest.raises(AdapterRefusedError, match=f"{WEIGHTS}: has changed in {URL}"):
        fetched_adapter(URL, wanted, copies, fetch)
    fsspec.filesystem("memory").rm(f"/headers/adapters/one/{WEIGHTS}")
    with pytest.raises(AdapterRefusedError, match="has changed"):
        fetched_adapter(URL, wanted, copies, fetch)
    assert copies.num_bytes == 0
    put(f"one/{WEIGHTS}", weights())
    wanted = {name: version for name, version in versions_at([URL], {})[URL].items() if name in wanted}
    folder = fetched_adapter(URL, wanted, copies, fetch)
    assert (folder / WEIGHTS).read_bytes() == weights()
    assert {path.name for path in folder.iterdir()} == set(wanted)


def test_a_store_that_fails_is_no_change_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = versions_at([URL], {})[URL]
    wanted = {name: versions[name] for name in read_files(versions)}

    def torn(fs: Any, path: str, target: Path, num_bytes: int) -> None:
        target.write_bytes(b"half")

    monkeypatch.setattr(adapter_files, "copy_file", torn)
    with pytest.raises(StorageError, match="fewer bytes came than"):
        from_store(URL, wanted, {}, tmp_path)
