"""Folders from anywhere become local folders, fetched once.

The same content is the same model, wherever it is stored; other content is another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.storage.local_copy import local_folder, model_sha256
from lorabatch.jobs.storage.location import Location
from lorabatch.system.long_work import LongWork, listening

Place = tuple[str, dict[str, Any]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_is_copied_whole_and_once(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, options = place
    remote = Location(url, options)
    files = {"config.json": b"{}", "sub/weights.safetensors": b"w" * 1000}
    for name, data in files.items():
        remote.write(name, data)
    folder = local_folder(url, options, tmp_path / "cache")
    assert contents(folder) == files
    if remote.is_local:
        assert folder == Path(url)
        return
    monkeypatch.setattr(type(remote.fs.store), "get_file", None)
    assert local_folder(url + "/", options, tmp_path / "cache") == folder


def test_a_changed_folder_is_copied_anew(place: Place, tmp_path: Path) -> None:
    url, options = place
    remote = Location(url, options)
    remote.write("config.json", b"old")
    first = local_folder(url, options, tmp_path / "cache")
    remote.write("config.json", b"new content")
    second = local_folder(url, options, tmp_path / "cache")
    assert contents(second) == {"config.json": b"new content"}
    assert (first == second) == remote.is_local


def test_pickles_are_named_and_never_fetched(s3_options: dict[str, Any], tmp_path: Path) -> None:
    remote = Location("memory://pickles/adapter")
    remote.write("adapter_config.json", b"{}")
    remote.write("adapter_model.bin", b"cos\nsystem\n")
    folder = local_folder(remote.url, {}, tmp_path)
    assert contents(folder) == {"adapter_config.json": b"{}", "adapter_model.bin": b""}


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Location("memory://half/model")
    remote.write("a.json", b"1")
    remote.write("b.json", b"2")
    copy = type(remote.fs.store).get_file
    copied: list[str] = []

    def fail_second(fs: Any, source: str, target: str, **options: Any) -> None:
        copied.append(source)
        if len(copied) == 2:
            raise PermissionError("Access Denied")
        copy(fs, source, target, **options)

    monkeypatch.setattr(type(remote.fs.store), "get_file", fail_second)
    with pytest.raises(StorageError, match=r"memory://half/model.*access was refused"):
        local_folder(remote.url, {}, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert contents(local_folder(remote.url, {}, tmp_path)) == {"a.json": b"1", "b.json": b"2"}


# A store that writes down what is read from it, and blocks reads while a file named `gate` is missing.
_ASK = """
import sys, time
from pathlib import Path
import fsspec
from fsspec.implementations.local import LocalFileSystem
from lorabatch.jobs.storage.local_copy import local_folder

source, cache = map(Path, sys.argv[1:])

class Watched(LocalFileSystem):
    protocol = "watched"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("watched://"))

    def get_file(self, file, target, **options):
        with (source.parent / "reads").open("a") as reads:
            reads.write(Path(file).name + "\\n")
        while not (source.parent / "gate").exists():
            time.sleep(0.01)
        super().get_file(file, target, **options)

fsspec.register_implementation("watched", Watched)
print("ready", flush=True)
sys.stdin.readline()
print(local_folder(f"watched://{source}", {}, cache), flush=True)
"""


def ask(folder: Path) -> subprocess.Popen[str]:
    """A process that will ask for the copy of `folder/source` on `start`."""
    command = [sys.executable, "-c", _ASK, str(folder / "source"), str(folder / "cache")]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "ready\n"
    return asking


def start(asking: subprocess.Popen[str]) -> None:
    assert asking.stdin is not None
    asking.stdin.write("go\n")
    asking.stdin.flush()


def wait_for_reads(folder: Path) -> None:
    pause, give_up_s = threading.Event(), time.monotonic() + 30
    while not (folder / "reads").exists():
        assert time.monotonic() < give_up_s
        pause.wait(0.01)


def test_processes_that_ask_at_once_read_the_source_once(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    files = {"a.json": b"1", "b.json": b"2"}
    for name, data in files.items():
        (tmp_path / "source" / name).write_bytes(data)
    asking = [ask(tmp_path) for _ in range(4)]
    for process in asking:
        start(process)
    wait_for_reads(tmp_path)
    (tmp_path / "gate").touch()
    (folder,) = {process.communicate(timeout=60)[0] for process in asking}
    assert contents(Path(folder.strip())) == files
    assert sorted((tmp_path / "reads").read_text().split()) == sorted(files)


def test_a_process_killed_while_it_fetches_blocks_no_other(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.json").write_bytes(b"1")
    killed, next_one = ask(tmp_path), ask(tmp_path)
    start(killed)
    wait_for_reads(tmp_path)
    start(next_one)
    with pytest.raises(subprocess.TimeoutExpired):
        next_one.wait(0.5)
    assert (tmp_path / "reads").read_text().split() == ["a.json"]
    killed.kill()
    killed.communicate()
    (tmp_path / "gate").touch()
    printed, _ = next_one.communicate(timeout=60)
    assert contents(Path(printed.strip())) == {"a.json": b"1"}


class SlowModel(BaseHTTPRequestHandler):
    """A store with one file of 8 MB, which it sends in `seconds`."""

    seconds = 1.5
    num_bytes, pieces = 8_000_000, 16

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.num_bytes))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        pause = threading.Event()
        for _ in range(self.pieces if "Range" not in self.headers else 0):
            self.wfile.write(b"w" * (self.num_bytes // self.pieces))
            pause.wait(self.seconds / self.pieces)

    def log_message(self, *_: Any) -> None:
        return


@contextmanager
def slow_store(seconds: float) -> Iterator[str]:
    """The URL of a file that takes so long."""
    handler = type("Slow", (SlowModel,), {"seconds": seconds})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/model.bin2?signature=secret"
        server.shutdown()


@pytest.mark.parametrize("seconds", [1.5, pytest.param(8.0, marks=pytest.mark.long)])
def test_a_copy_that_takes_long_says_its_size_and_how_far_it_is(tmp_path: Path, seconds: float) -> None:
    lines: list[str] = []
    with slow_store(seconds) as url, listening(lines.append), pytest.raises(StorageError, match="expected a folder"):
        local_folder(url, {}, tmp_path)
    shown = f"copying {url.partition('?')[0]}?***"
    assert lines[:1] == [f"{shown} (8 MB), once for this machine"]
    assert [line for line in lines[1:] if re.fullmatch(rf"{re.escape(shown)}: \d\d% of 8 MB", line)] == lines[1:]
    assert lines[1:] or seconds < 6


def test_copies_of_folders_in_object_stores_count_what_is_read(
    s3_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket-{uuid4().hex}/model"
    fsspec.filesystem("s3", **s3_options).mkdir(url.rpartition("/")[0])
    remote = Location(url, s3_options)
    sizes = {"a.safetensors": 12_000_000, "b.json": 5, "c.bin": 1000}
    for name, size in sizes.items():
        remote.write(name, b"w" * size)
    counted: list[int] = []
    monkeypatch.setattr(LongWork, "add", lambda self, num_bytes: counted.append(num_bytes))
    local_folder(url, s3_options, tmp_path)
    assert sum(counted) == 12_000_005
    assert len(counted) > 2


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([0.5, 0.9], []),
        ([0.5, 1.5], ["x (10 MB), once for this machine"]),
        ([1.0, 2.0, 7.0], ["x (10 MB), once for this machine", "x: 90% of 10 MB"]),
    ],
)
def test_work_that_may_be_short_says_nothing_until_it_takes_long(seconds: list[float], said: list[str]) -> None:
    lines: list[str] = []
    times = iter([0.0, *seconds])
    with listening(lines.append):
        work = LongWork("x", 10_000_000, lambda: next(times), quiet_s=1.0)
    for _ in seconds:
        work.add(3_000_000)
    assert lines == said


def test_names_cannot_lead_out_of_the_copy(tmp_path: Path) -> None:
    class Evil(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "evil"

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            raise FileNotFoundError(path)

        def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
            return {f"{path}/../../evil.json": {"size": 1}}

        def get_file(self, source: str, target: str, **_: Any) -> None:
            raise AssertionError(f"{source} would be written to {target}")

    fsspec.register_implementation("evil", Evil, clobber=True)
    with pytest.raises(StorageError, match="outside its folder"):
        local_folder("evil://remote", {}, tmp_path / "cache")


@pytest.mark.parametrize("name", ["adapter", "adapter/"])
def test_a_folder_that_may_only_be_listed_is_copied(name: str, tmp_path: Path) -> None:
    class ListedOnly(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "listed-only"

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            raise PermissionError(path)

        def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
            return {f"{path}/adapter_config.json": {"size": 2}}

        def get_file(self, source: str, target: str, **_: Any) -> None:
            Path(target).write_text("{}")

    fsspec.register_implementation("listed-only", ListedOnly, clobber=True)
    copied = local_folder(f"listed-only://{name}", {}, tmp_path / "cache")
    assert (copied / "adapter_config.json").read_text() == "{}"


@pytest.mark.parametrize("url", ["/no/such/folder", "memory://nothing/here"])
def test_what_is_not_there_is_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing there|not found"):
        local_folder(url, {}, tmp_path)


def test_a_file_where_a_folder_is_expected_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(StorageError, match="expected a folder, found a file"):
        local_folder(str(tmp_path / "model.bin"), {}, tmp_path)


def test_a_hub_name_without_the_hub_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StorageError, match=r"'org/model': no such local folder.*pip install huggingface_hub"):
        local_folder("org/model", {}, tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (folder / name).write_text(name)
    return folder


def test_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("does not count")
    assert model_sha256(model, cache_root=tmp_path) == model_sha256(tmp_path / "copy", cache_root=tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "b.safetensors", "chat_template.jinja"])
def test_any_change_is_another_model(model: Path, tmp_path: Path, name: str) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    (model / name).write_text("other")
    assert model_sha256(model, cache_root=tmp_path) != before


def test_weights_are_read_once_until_they_change(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)
        assert model_sha256(model, cache_root=tmp_path) == before
    path = model / "a.safetensors"
    facts = path.stat()
    path.write_text("A.safetensors")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert model_sha256(model, cache_root=tmp_path) != before


def test_weights_edited_in_place_are_another_model_whatever_their_time_of_change_says(
    model: Path, tmp_path: Path
) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    path = model / "a.safetensors"
    facts, content = path.stat(), path.read_bytes()
    path.write_bytes(content.swapcase())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (
        facts.st_size,
        facts.st_mtime_ns,
        facts.st_ino,
    )
    assert model_sha256(model, cache_root=tmp_path) != before


def test_weights_are_hashed_again_when_what_is_remembered_is_not_trusted(model: Path, tmp_path: Path) -> None:
    before = model_sha256(model, cache_root=tmp_path)
    # As if the file had been changed and nothing that the file system says of it.
    for remembered in (tmp_path / "digests").iterdir():
        remembered.write_text("0" * 64)
    assert model_sha256(model, cache_root=tmp_path) != before
    assert model_sha256(model, use_remembered=False, cache_root=tmp_path) == before
    assert model_sha256(model, cache_root=tmp_path) == before


def test_weights_do_not_count_when_none_are_loaded(model: Path, tmp_path: Path) -> None:
    before = model_sha256(model, with_weights=False, cache_root=tmp_path)
    (model / "a.safetensors").unlink()
    assert model_sha256(model, with_weights=False, cache_root=tmp_path) == before


def test_a_cache_that_cannot_be_written_costs_time_only(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    assert model_sha256(model, cache_root=blocked) == model_sha256(model, cache_root=tmp_path)
