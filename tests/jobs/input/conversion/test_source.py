"""Files of text: their compression, encoding and hash."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.conversion import source as module
from lorabatch.jobs.input.conversion.source import Source, UnreadableSourceError

TEXT = b"id,prompt\n" + b"".join(b"%d,number %d\n" % (number, number) for number in range(1000))


def compressed(kind: str) -> bytes:
    match kind:
        case "gz":
            return gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:])  # two members, as `cat` makes them
        case "bz2":
            return bz2.compress(TEXT)
        case "xz":
            return lzma.compress(TEXT)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {"zst": "zstd"}.get(kind, kind)) as stream:
        stream.write(TEXT)
    return bytes(sink.getvalue())


def read(path: Path) -> tuple[bytes, str]:
    with Source(str(path), {}, str(path), str(path), path.name, "CSV").text() as (text, raw):
        return text.read(), raw.sha256()


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "xz", "lz4"])
def test_compressed_text_is_read_and_its_file_is_hashed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.csv.{kind}"
    path.write_bytes(compressed(kind))
    assert read(path) == (TEXT, hashlib.sha256(path.read_bytes()).hexdigest())
    for wrong in (path.read_bytes()[:-20], b"id,prompt\n"):
        path.write_bytes(wrong)
        with pytest.raises(UnreadableSourceError, match=r"damaged .* Write it again|its bytes are not"):
            read(path)


def test_compression_is_known_by_content_where_the_name_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(compressed("gz"))
    assert read(path)[0] == TEXT
    path.write_bytes(b"BZh is how this text begins\n")
    assert read(path)[0] == path.read_bytes()


def test_few_bytes_that_stand_for_many_are_refused(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_DECOMPRESSED_BYTES", 32 << 20)
    bomb = gzip.compress(b"id,prompt\n" + b"1,two\n" * (8 << 20))
    for kind in ("CSV", "JSON Lines"):
        with pytest.raises(JobRequestError, match=r"and more than 100 times its size|line 1: not valid JSON"):
            convert(kind, bomb, name="x.gz")


def test_a_file_of_excel_that_is_called_csv_is_called_so(convert: Any) -> None:
    for kind in ("CSV", "TSV", "JSON Lines"):
        with pytest.raises(JobRequestError, match="a ZIP archive, as files of Excel are, not text"):
            convert(kind, b"PK\x03\x04\x14\x00\x06\x00", name="rows.csv")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_characters_may_be_cut_by_reads(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"x" * ((1 << 20) - cut) + "ɐ🙂é".encode() * 10)
    assert read(path)[0] == path.read_bytes()
    path.write_bytes(b"x" * ((1 << 20) - cut) + "🙂".encode()[:3])
    with pytest.raises(UnreadableSourceError, match=f"byte {(1 << 20) - cut}: "):
        read(path)
