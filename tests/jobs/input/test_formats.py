"""A file of a format that is not read is told what it seems to be, and what to do with it works."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.files import read_footers

ROWS = [{"id": "a", "prompt": "one, two"}, {"id": "b", "prompt": "three"}]
CSV = b'id,prompt\na,"one, two"\nb,three\n'
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def refused(*urls: Path) -> str:
    with pytest.raises(JobRequestError) as caught:
        read_footers([str(url) for url in urls], {}, lambda items: [])
    return "\n".join(caught.value.problems)


def found(url: Path) -> list[tuple[str, str]]:
    """Name and format of each file that is read."""
    seen: list[tuple[str, str]] = []

    def convert(items: Any) -> list[str]:
        seen.extend((item.name, item.kind) for item in items)
        raise JobRequestError("seen")

    try:
        footers, _ = read_footers([str(url)], {}, convert)
    except JobRequestError:
        return seen
    return [(footer.file.name, "Parquet") for footer in footers]


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")


GZIPPED = gzip.compress(CSV, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "data.json.bak",
            JSON_LINES,
            "it begins like JSON Lines, which is read by its ending. Rename it to data.json",
        ),
        ("data.json.1", b'[{"id": 1}]', "it begins like JSON Lines, .* Rename it to data.json,"),
        ("dump", b'\n {"id": 1}', "it begins like JSON Lines, .* Rename it to dump.jsonl, or leave it out"),
        ("rows.data", CSV, "it begins like CSV, .* Rename it to rows.csv,"),
        ("rows.text", "ä;b\n1;2".encode(), "it begins like CSV"),
        ("rows.csv~", b"\xef\xbb\xbfa\tb\n1\t2\n", "it begins like TSV, .* Rename it to rows.tsv,"),
        ("notes.txt", b"Hello, world.\n\nBye.\n", "text without columns, which is not read. If each of its lines"),
        ("ONE.TXT", "a line of prosé".encode(), "text without columns"),
        ("page.aspx", b"<!DOCTYPE html><html>", "a web page or XML, which is not read. Give the address of the table"),
        ("rows.xml", b"\xef\xbb\xbf<?xml version='1.0'?>", "a web page or XML"),
        ("chats.log", b"<|im_start|>user\nhello", "text without columns"),
        (
            "table.bin",
            b"\x00\x01\x02",
            r"neither its ending \.bin nor .* Expected Parquet, CSV \(\.csv\)",
        ),
        ("000000_0", b"\xfe\xed" * 9, "neither its name, which has no ending, nor its first bytes"),
        ("empty.txt", b"", r"neither its ending \.txt nor its first bytes"),
        ("wide.txt", "a,b".encode("utf-16"), r"neither its ending \.txt nor its first bytes"),
        ("rows.pkl", b"\x80\x04\x95", "Python's pickle, which is not read: it may run any code"),
        ("rows.db", b"SQLite format 3\x00", "a database of SQLite, which is not read"),
        ("rows.backup", b"Obj\x01", "Avro, which is not read"),
        (
            "tickets.XLSX",
            b"PK\x03\x04",
            "Excel, which is not read. Write it as Parquet, with pandas and openpyxl: ",
        ),
        ("tickets.xls", b"\xd0\xcf\x11\xe0", "Excel, .* with pandas and xlrd: python -c "),
        ("tickets.zip", b"PK\x03\x04", "a ZIP archive, as files of Excel are, which is not read. Unpack it"),
        ("rows.csv.snappy", b"x", "CSV compressed as .snappy, which is not read. Compress it with gzip instead"),
        ("rows.orc.gz", gzip.compress(b"ORC", mtime=0), "ORC compressed as .gz, which is not read. Decompress it"),
        ("rows.parquet.zst", b"\x28\xb5\x2f\xfd", "Parquet compressed as .zst, which is not read. Decompress it"),
        ("rows.gz", GZIPPED, "a compressed file whose name does not say what it holds. Rename it, as in"),
        ("rows.tgz", GZIPPED, "a compressed file whose name does not say"),
    ],
)
def test_a_file_of_no_format_is_called_what_it_is(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    for url in (tmp_path / "in" / name, tmp_path / "in" / "*"):
        said = refused(url)
        assert re.match(f"input file '{re.escape(name)}': {expected}", said), said
        assert said.count("\n") == 0
        assert said.endswith(".")
        assert "Parquet file" not in said
    said = refused(tmp_path / "in")
    assert "no Parquet files there (1 " in said
    if not expected.startswith("neither"):
        assert re.search(f"'{re.escape(name)}': {expected}", said), said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CSV, "it does not end as Parquet files do.*; it begins like CSV, which .* Rename it to rows.csv"),
        (JSON_LINES, "; it begins like JSON Lines, .* Rename it to rows.jsonl"),
        (b"ARROW1\x00\x00" + b"x" * 20, "; it begins like Arrow, .* Rename it to rows.arrow"),
        (b"PK\x03\x04" + b"x" * 20, "; a ZIP archive, as files of Excel are"),
        (GZIPPED, "; a compressed file whose name does not say"),
        (b"<html>" + b"x" * 20, "; a web page or XML"),
        (b"PAR1" + b"x" * 20, r"it may be cut off\). Write it again or leave it out"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "; text without columns"),
    ],
)
def test_another_format_under_an_ending_of_parquet_is_called_by_its_name(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    assert re.match(rf"input file 'rows.parquet': not a readable Parquet file \(.*{expected}", refused(tmp_path))


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt", "rows.xlsx", "rows", "rows.json.bak", "rows.csv.gz"])
def test_parquet_under_another_ending_is_read(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    assert found(tmp_path / name) == found(tmp_path) == [(name, "Parquet")]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".bz2", ".xz", ".lz4"])
@pytest.mark.parametrize(("ending", "kind"), [("csv", "CSV"), ("TSV", "TSV"), ("jsonl", "JSON Lines"), ("JSON",) * 2])
def test_endings_are_read_in_all_letters_and_compressions(
    tmp_path: Path, ending: str, kind: str, compression: str
) -> None:
    kind = kind.replace("JSON Lines", "JSON").replace("JSON", "JSON Lines")
    for name in (f"a.b.{ending}{compression}", f"A.{ending.upper()}{compression.upper()}"):
        (tmp_path / name).write_bytes(b"any")
        assert found(tmp_path / name) == [(name, kind)]
    assert {kind for _, kind in found(tmp_path)} == {kind}


def test_a_glob_with_files_of_no_format_beside_others_names_them(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(CSV)
    (tmp_path / "README.txt").write_text("about")
    said = refused(tmp_path / "*")
    assert "beside files of CSV there are others, of no format that is read (1 .txt), such as 'README.txt'" in said
    assert "'README.txt': text without columns" in said
    assert found(tmp_path) == [("rows.csv", "CSV")]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "more.parquet")
    (tmp_path / "rows.csv").unlink()
    assert refused(tmp_path / "*").startswith("input file 'README.txt': text without columns")


def test_a_folder_of_such_files_says_what_each_ending_is(tmp_path: Path) -> None:
    zipped(tmp_path / "b.xlsx")
    for name in ("a.txt", "c.txt", "d.bin"):
        (tmp_path / name).write_text("one")
    (tmp_path / ".hidden.xml").write_text("<?xml?>")
    said = refused(tmp_path)
    assert "no Parquet files there (2 .txt, 1 .bin, 1 .xlsx). Expected a file of Parquet, CSV" in said
    assert said.index("'a.txt': text") < said.index("'b.xlsx': Excel") < said.index("'d.bin': text")
    assert "c.txt" not in said
    assert "hidden" not in said


def _excel(path: Path) -> None:
    pytest.importorskip("openpyxl")
    pd.DataFrame(ROWS).to_excel(path, index=False)


@pytest.mark.parametrize(
    ("name", "write", "made", "kind"),
    [
        ("a b's.avro", lambda path: pl.DataFrame(ROWS).write_avro(path), "a b's.parquet", "Parquet"),
        ("rows.dta", lambda path: pd.DataFrame(ROWS).to_stata(path, write_index=False), "rows.parquet", "Parquet"),
        ("rows.xlsx", _excel, "rows.parquet", "Parquet"),
        ("my notes.txt", lambda path: path.write_text("one, two\n\nthree \n"), "my notes.jsonl", "JSON Lines"),
    ],
)
def test_the_command_of_a_message_makes_a_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], Any], made: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name)
    said = refused(Path(name))
    command = said[said.index("python -c ") :].removesuffix(" (or leave it out).")
    assert str(tmp_path) not in command
    subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    assert found(tmp_path / made) == [(made, kind)]
    if kind == "Parquet":
        assert [row["prompt"] for row in pq.read_table(tmp_path / made).to_pylist()] == ["one, two", "three"]
    else:
        lines = (tmp_path / made).read_text().splitlines()
        assert list(map(json.loads, lines)) == [{"prompt": "one, two"}, {"prompt": "three"}]


def test_no_name_is_typed_into_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2J\n.txt").write_text("one")
    said = refused(tmp_path / "a\x1b[2J\n.txt")
    assert said.isprintable()
    assert "< FILE > FILE.jsonl" in said
