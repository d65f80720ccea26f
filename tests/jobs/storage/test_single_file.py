"""Lines of any file in bounded memory, and new files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lorabatch.jobs.errors import JobRequestError, MissingFileError, StorageError
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.storage.single_file import read_lines, replaced_file

Place = tuple[str, dict[str, Any]]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\nb\r\n\n", [b"a\n", b"b\r\n", b"\n"]),
        (b"1234567\n12345678\n123456789\nz", [b"1234567\n", None, None, b"z"]),
        (b"x" * 50, [None]),
        (b"x" * 50 + b"\n\nend", [None, b"\n", b"end"]),
        (b"x" * 17 + b"\n" + b"y" * 16, [None, None]),
    ],
)
def test_lines_are_read_with_their_ends_and_longer_ones_are_passed_over(
    place: Place, content: bytes, lines: list[bytes | None]
) -> None:
    url, options = place
    Location(url, options).write("a.jsonl", content)
    assert list(read_lines(f"{url}/a.jsonl", options, 8)) == lines


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"cannot read .*gone\.jsonl: not found"):
        list(read_lines(str(tmp_path / "gone.jsonl"), {}, 8))
    with pytest.raises(StorageError, match="cannot read"):
        list(read_lines(str(tmp_path), {}, 8))


def test_a_new_file_takes_the_old_ones_place_when_it_is_whole(place: Place) -> None:
    url, options = place
    location = Location(url, options)
    location.write("a.jsonl", b"old")
    with replaced_file(f"{url}/a.jsonl", options) as file:
        file.write(b"new " * 100_000)
        file.flush()
        assert location.read("a.jsonl") == b"old"
    assert location.read("a.jsonl") == b"new " * 100_000
    assert location.list() == {"a.jsonl": 400_000}


@pytest.mark.parametrize("error", [ValueError("no"), JobRequestError("no"), KeyboardInterrupt()])
def test_after_an_error_the_old_file_is_there_and_nothing_else(
    place: Place, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    url, options = place
    location = Location(url, options)
    location.write("a.jsonl", b"old")

    def fail() -> None:
        with replaced_file(f"{url}/a.jsonl", options) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert location.read("a.jsonl") == b"old"
    assert location.list() == {"a.jsonl": 3}
    assert not [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]


def test_a_new_file_has_the_permissions_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    with replaced_file(str(tmp_path / "new" / "a.jsonl"), {}):
        pass
    assert (tmp_path / "new" / "a.jsonl").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert os.listdir(tmp_path / "new") == ["a.jsonl"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("file/a.jsonl", "folder.jsonl"):
        with pytest.raises(StorageError, match=f"cannot write .*{name}"), replaced_file(str(tmp_path / name), {}):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.jsonl"}


def test_a_store_that_refuses_the_file_is_named_without_secrets() -> None:
    with (
        pytest.raises(StorageError, match=r"cannot write https://\*\*\*@127.0.0.1:1/a.jsonl") as caught,
        replaced_file("https://me:secret@127.0.0.1:1/a.jsonl", {"limit_s": 0.5}) as file,
    ):
        file.write(b"x")
    assert "secret" not in str(caught.value)
