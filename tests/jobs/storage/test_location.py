"""Files are whole or absent, on local disks and in object stores.

Names of a journal's segments.
"""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError
from distributed.core import error_message
from distributed.protocol import pickle as dask_pickle

from lorabatch.jobs.errors import MissingFileError, StorageError
from lorabatch.jobs.storage.location import (
    Location,
    _warn_unconditional,
    absolute,
    last_segment,
    next_segment,
    options_for,
    segments_of,
)
from lorabatch.tests.end_to_end.bucket import s3_server
from lorabatch.tests.end_to_end.chaos.place import can_mount, mounted

Place = tuple[str, dict[str, Any]]


@pytest.fixture
def location(place: Place) -> Location:
    return Location(*place, scratch="_scratch")


def test_what_another_process_writes_after_a_listing_is_read_whole(location: Location) -> None:
    """s3fs looks for the size of a file in old listings before it reads it."""
    location.write("sub/a", b"one")
    assert location.list("sub") == {"a": 3}
    if location.is_local:
        location.local_path("sub/b").write_bytes(b"four")
    else:
        other, _ = fsspec.core.url_to_fs(location.url, skip_instance_cache=True, **location.storage_options)
        other.pipe_file(location.path("sub/b"), b"four")
    assert location.read("sub/b") == b"four"


def test_written_files_are_listed_and_read_back(location: Location) -> None:
    assert location.list() == {}
    assert not location.exists("a.txt")
    location.write("a.txt", b"one")
    location.write("sub/b.txt", memoryview(b"four"))
    location.write("a.txt", b"three")
    assert {name: size for name, size in location.list().items() if name != "_scratch"} == {"a.txt": 5, "sub": None}
    assert location.list("sub") == {"b.txt": 4}
    assert location.read("a.txt") == b"three"
    with location.open("sub/b.txt") as file:
        file.seek(1)
        assert file.read() == b"our"
    assert location.exists("sub/b.txt")
    assert not location.exists("sub")


def test_links_in_a_local_folder_are_listed_as_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_bytes(b"four")
    for name, target in {"file": "there/a.txt", "folder": "there", "lost": "gone"}.items():
        (tmp_path / name).symlink_to(target)
    for url in (str(tmp_path), f"file://{tmp_path}/", f"local://{tmp_path}", os.path.relpath(tmp_path)):
        location = Location(url)
        assert location.is_local
        assert location.list() == {"there": None, "file": 4, "folder": None, "lost": len("gone")}
        assert [location.exists(name) for name in ("file", "folder", "lost")] == [True, False, False]
        assert location.path("file") == str(tmp_path / "file")


def test_what_another_process_wrote_is_seen_at_once(place: Place) -> None:
    here, there = Location(*place), Location(*place)
    assert here.list() == {}
    there.write("new.txt", b"x")
    assert here.exists("new.txt")
    assert set(here.list()) == {"new.txt"}
    there.remove(["new.txt"])
    assert not here.exists("new.txt")
    assert "new.txt" not in here.list()


def test_create_leaves_what_is_there(location: Location) -> None:
    assert location.create("once", b"first")
    assert not location.create("once", b"second")
    assert location.read("once") == b"first"


def test_of_many_writers_at_once_one_creates_the_file(shared_place: Place) -> None:
    barrier = threading.Barrier(6)

    def write(number: int) -> bool:
        location = Location(*shared_place, scratch="_scratch")
        barrier.wait()
        return location.create("once", bytes([number]) * 1000)

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert sum(won) == 1
    assert Location(*shared_place).read("once") == bytes([won.index(True)]) * 1000


def test_a_journal_is_read_in_the_order_it_was_written(location: Location) -> None:
    assert location.read_journal("log") == b""
    for piece in (b"a", b"b", b"c" * 1000):
        location.append("log", piece)
        location.append("logs/other", b"x")
    location.append("log2", b"not this one")
    assert location.read_journal("log") == b"ab" + b"c" * 1000
    assert location.read_journal("logs/other") == b"xxx"


_FILLS_THE_DISK = """
import resource, sys
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.storage.location import Location

place = Location(sys.argv[1])
place.append("log", b"a" * 1000)
# The system writes up to the limit, and refuses the rest.
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
try:
    place.append("log", b"b" * 1000)
except StorageError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    place.append("log", b"c" * 1000)
"""


def test_what_a_disk_takes_half_of_is_taken_back(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FILLS_THE_DISK, str(tmp_path)], check=True)
    assert Location(str(tmp_path)).read_journal("log") == b"a" * 1000 + b"c" * 1000


def test_removing_takes_files_and_folders_and_minds_nothing_missing(location: Location) -> None:
    location.write("keep", b"1")
    for name in ("x/1", "x/2", "y"):
        location.write(name, b"0")
    location.remove(["x", "y", "z", "x"])
    assert set(location.list()) - {"_scratch"} == {"keep"}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_is_put_in_place_of_another_one_and_whole(location: Location, is_taken: bool) -> None:
    location.write("below/there/new", b"new")
    if is_taken:
        location.write("part", b"old and longer")
    for _ in range(2 - location.is_local):  # what a store copies can be put again
        location.put("below/there/new", "part")
        assert location.read("part") == b"new"
    location.remove(["below"])
    assert {"part"} <= location.list().keys() <= {"part", "_scratch"}
    with pytest.raises(MissingFileError):
        location.put("below/there/new", "part")
    assert location.read("part") == b"new"


def test_reading_what_is_missing_says_where_it_was_looked_for(location: Location) -> None:
    with pytest.raises(MissingFileError, match=r"place/gone\.txt"):
        location.read("gone.txt")
    with pytest.raises(MissingFileError, match=r"place/gone\.txt"):
        location.open("gone.txt").read()


def test_a_location_travels_between_processes(location: Location) -> None:
    location.write("a", b"1")
    copy = pickle.loads(pickle.dumps(location))
    assert copy.read("a") == b"1"
    copy.write("b", b"2")
    assert location.read("b") == b"2"


def test_local_writes_leave_no_temporary_files_even_when_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location(str(tmp_path / "out"), scratch="tmp")
    location.write("a", b"before")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (location.write, location.create):
        with pytest.raises(StorageError, match=r"cannot write .*out/a: the disk is full\. Free some space"):
            write("a", b"after")
    assert location.read("a") == b"before"
    assert list((tmp_path / "out" / "tmp").iterdir()) == []


def test_a_disk_without_hard_links_still_gets_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    location = Location(str(tmp_path))
    assert location.create("a", b"1")
    assert not location.create("a", b"2")
    assert location.read("a") == b"1"


def test_a_file_where_a_folder_should_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot write"):
        Location(str(tmp_path / "file")).write("a", b"1")


def test_a_missing_bucket_is_named_when_writing(s3_options: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match=r"cannot write s3://no-such-bucket/out/a: not found .* bucket's name"):
        Location("s3://no-such-bucket/out", s3_options).write("a", b"1")


def test_a_missing_bucket_is_no_empty_folder(s3_options: dict[str, Any], shared_place: Place) -> None:
    Location(*shared_place).check_folder()
    with pytest.raises(MissingFileError, match=r"cannot find the bucket of s3://no-such-bucket/out: not found"):
        Location("s3://no-such-bucket/out", s3_options).check_folder()


def test_a_local_folder_that_may_not_be_written_to_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Location(str(tmp_path / "to" / "come")).check_folder()
    # a test run as root may write everywhere
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StorageError, match=r"access was refused .* Check the permissions of the file"):
        Location(str(tmp_path / "to" / "come")).check_folder()


@pytest.mark.skipif(not can_mount(), reason="this process may not mount file systems")
def test_a_read_only_volume_is_named_as_one(tmp_path: Path) -> None:
    with mounted(tmp_path):
        location = Location(str(tmp_path / "to" / "come"))
        location.check_folder()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        for write in (location.check_folder, lambda: location.write("a", b"1"), lambda: location.append("b", b"1")):
            with pytest.raises(StorageError, match=r"the volume is read-only .* Mount it for writing, or name another"):
                write()


def test_a_store_that_refuses_to_say_is_not_taken_for_an_empty_one(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location("s3://bucket/out", s3_options)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(location.fs, "info", refuse)
    with pytest.raises(StorageError, match=r"cannot look for s3://bucket/out/_SUCCESS: access was refused"):
        location.exists("_SUCCESS")


@pytest.mark.parametrize("refusal", [TypeError("mode"), NotImplementedError(), OSError(5, "NotImplemented: header")])
def test_a_store_without_conditional_writes_still_gets_whole_files_and_says_so_once(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    location = Location(f"memory://{id(refusal)}/place")
    plain_write = location.fs.pipe_file

    def write(path: str, data: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise refusal
        plain_write(path, data)

    monkeypatch.setattr(location.fs, "pipe_file", write)
    _warn_unconditional.cache_clear()
    assert location.create("a", b"1")
    assert location.create("b", b"2")
    assert not location.create("a", b"3")
    assert location.read("a") == b"1"
    assert [record.message for record in caplog.records if "no conditional writes" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "reply",
    [
        "not-implemented",
        *(pytest.param(r, marks=pytest.mark.long) for r in ("invalid-argument", "own-code", "no-body")),
    ],
)
def test_a_server_that_refuses_conditional_puts_gets_plain_ones(
    reply: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_unconditional.cache_clear()
    with s3_server(tmp_path, CONDITIONAL_PUT=reply) as bucket:
        bucket.fs.mkdir("bucket")
        location = Location("s3://bucket/place", bucket.options)
        assert location.create("a", b"1")
        assert not location.create("a", b"2")
        assert location.read("a") == b"1"
        with pytest.raises(MissingFileError, match="no-such-bucket"):
            Location("s3://no-such-bucket/place", bucket.options).create("a", b"1")
    assert "no conditional writes" in caplog.text


@pytest.mark.parametrize("status", [400, 409, 412, 501])
def test_the_loser_of_a_race_is_known_by_the_status_whatever_the_store_calls_it(
    status: int, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location(f"s3://races-{status}/place", s3_options)
    location.fs.mkdir(f"races-{status}")
    put = location.fs.pipe_file

    def lose(path: str, data: bytes, mode: str = "overwrite") -> None:
        assert mode == "create", "the winner's file must not be replaced"
        put(path, b"the winner's")
        reply = {"Error": {"Code": "AtLeastOne", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise OSError(22, "no") from ClientError(reply, "PutObject")  # type: ignore[arg-type]

    monkeypatch.setattr(location.fs, "pipe_file", lose)
    assert not location.create("a", b"the loser's")
    assert location.read("a") == b"the winner's"


def test_a_store_that_does_not_answer_says_what_to_check() -> None:
    nowhere = {"key": "key-1", "secret": "secret-1", "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    options = nowhere | {"config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(StorageError, match=r"no reply .* Check the network, and the endpoint") as caught:
        Location("s3://bucket/out", options).list()
    assert "secret-1" not in str(caught.value)


class _Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    def log_message(self, *_: Any) -> None:
        return


def test_an_error_leaves_a_worker_without_the_signed_url_that_was_refused_and_as_what_it_is() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StorageError) as caught:
            Location(f"http://127.0.0.1:{server.server_port}/out?sig=very-secret-value", {"limit_s": 0.5}).read("a")
        server.shutdown()
    sent = error_message(caught.value)["exception"].data
    assert b"very-secret-value" not in sent
    received = dask_pickle.loads(sent)
    assert type(received) is StorageError
    assert str(received) == str(caught.value)
    assert received.__traceback__ is not None


@pytest.mark.parametrize("url", ["zzz://bucket/out", "s3//bucket\0/out"])
def test_an_impossible_url_is_explained(url: str) -> None:
    with pytest.raises(StorageError):
        Location(url).write("a", b"1")


def test_credentials_that_are_refused_say_so_and_stay_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    location = Location("s3://bucket/out", {"key": "AKIAEXAMPLEKEY", "secret": "very-secret-value"})

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied for AKIAEXAMPLEKEY with very-secret-value")

    monkeypatch.setattr(location.fs, "pipe_file", refuse)
    with pytest.raises(StorageError) as caught:
        location.write("a", b"1")
    assert "access was refused" in str(caught.value)
    assert "--storage-options" in str(caught.value)
    assert "very-secret" not in str(caught.value)
    assert "AKIA" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "very-secret" not in repr(location)


def test_options_go_to_the_protocol_they_are_meant_for() -> None:
    both = {"s3": {"key": "k"}, "gs": {"token": "t"}}
    assert options_for("s3://b/x", both) == {"key": "k"}
    assert options_for("gs://b/x", both) == {"token": "t"}
    assert options_for("/local/path", both) == {}
    assert options_for("az://b/x", both) == {}
    plain = {"key": "k", "client_kwargs": {"endpoint_url": "http://x"}}
    assert options_for("s3://b/x", plain) == plain
    assert options_for("file:///x", plain) == {}


def test_only_local_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("a/../b") == str(tmp_path / "b")
    assert absolute("s3://bucket/x") == "s3://bucket/x"


def written_to_log(present: Iterable[str], *times_ns: int) -> list[str]:
    """Names of segments of "log" that one writer adds at these times to those in `present`."""
    last, names = last_segment("log", present), []
    for now_ns in times_ns:
        name, last = next_segment("log", last, now_ns)
        names.append(name)
    return names


def test_segments_sort_in_the_order_of_writing_even_within_one_tick_of_the_clock() -> None:
    written = written_to_log([], 5, 5, 4, 10**19)
    assert segments_of("log", reversed(written)) == written


def test_a_writer_whose_clock_is_behind_goes_on_after_those_before_it() -> None:
    before = written_to_log([], 1000, 1000)
    after = written_to_log(before, 10, 10)
    assert segments_of("log", [*after, *before]) == [*before, *after]


def test_other_journals_and_a_file_of_the_journals_own_name_do_not_disturb() -> None:
    present = ["log", "log2.00000000000000009999-aa", "log.note", "other"]
    (name,) = written_to_log(present, 7)
    assert name.startswith("log.00000000000000000007-")
    assert segments_of("log", [*present, name]) == ["log", name, "log.note"]
