"""Reads CSV and TSV files: every field as text first, then columns of numbers as numbers.

A column is a number only where the text of each of its values can be had back from the number, so that `007`, `1.50`
and a number of 30 digits keep their text. Dates, times and `true` stay text. A field without a sign in it is null; a
pair of quotes is empty text.
"""

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from ....system.untrusted import shown, shown_name
from .source import MAX_ROW_BYTES, Source, TextFile, UnreadableSourceError
from .tables import Spool

_MAX_HEADER_BYTES = 1 << 20
_MAX_COLUMNS = 10_000
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_READ_BYTES = 1 << 20
# Integers up to this one have a double of their own.
_MAX_EXACT = 1 << 53
_TEXT_CHARACTERS = 60


@dataclass(slots=True)
class CsvColumns:
    """Facts about the values of all CSV files of a job: column -> the number types that still hold all of them."""

    #: Columns that stay text.
    texts: Collection[str] = ()
    #: Columns that are numbers in whatever way these are written, since the job takes them as settings.
    numbers: Collection[str] = ()
    _kinds: dict[str, _Numbers] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """Take account of more values. All columns are text."""
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            if name not in self.texts:
                self._kinds.setdefault(name, _Numbers(is_setting=name in self.numbers)).add(values)

    def type_of(self, name: str) -> pa.DataType:
        """The type of a column: string, int64 or double."""
        found = self._kinds.get(name)
        return pa.string() if found is None else found.type()

    def typed(self, batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
        """A batch of these columns, all text, with the columns of numbers as numbers."""
        columns = [values.cast(self.type_of(name)) for name, values in zip(names, batch.columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, names=names)


@dataclass(slots=True)
class _Numbers:
    """The number types that hold all values of one column so far."""

    #: Whether values may be written in any way: `0.70` and `1` are the same number there as 0.7 and 1.0.
    is_setting: bool
    # Whether there is a value that is not null.
    _has_values: bool = False
    # Whether all values are integers so far.
    _is_integer: bool = True
    # Whether all values are doubles so far.
    _is_double: bool = True
    # Whether some value is written as `1`.
    _has_plain: bool = False
    # Whether some value is written as `1.0`. Beside `1` it is the same double, so a column has one of both only.
    _has_point: bool = False
    # Whether some value has a fraction, so that a double is what it looks like.
    _has_fraction: bool = False

    def add(self, texts: pa.Array) -> None:
        """Take account of more values."""
        texts = texts.drop_null()
        if not len(texts) or not (self._is_integer or self._is_double):
            return
        self._has_values = True
        integers = self._cast(texts, pa.int64())
        if self._is_integer:
            self._is_integer = integers is not None and (self.is_setting or _all_equal(integers, texts))
        if self._is_double:
            self._is_double = self._holds_doubles(texts, integers)

    def type(self) -> pa.DataType:
        """The narrowest type that holds all values without a change."""
        if not self._has_values or not (self._is_integer or self._is_double):
            return pa.string()
        if self._is_integer:
            return pa.int64()
        return pa.float64() if self.is_setting or self._has_point or self._has_fraction else pa.string()

    def _holds_doubles(self, texts: pa.Array, integers: pa.Array | None) -> bool:
        doubles = self._cast(texts, pa.float64())
        if doubles is None or not pc.all(pc.is_finite(doubles)).as_py():
            return False
        if integers is not None and not _are_exact(integers):
            return False
        if self.is_setting:
            return True
        printed = doubles.cast(pa.string())
        is_plain = pc.equal(printed, texts)
        is_whole = pc.invert(pc.match_substring_regex(printed, r"[.en]"))
        has_point = pc.equal(pc.binary_join_element_wise(printed, ".0", ""), texts)
        self._has_point |= pc.any(has_point).as_py()
        self._has_plain |= pc.any(pc.and_(is_plain, is_whole)).as_py()
        self._has_fraction |= not pc.all(is_whole).as_py()
        return bool(pc.all(pc.or_(is_plain, has_point)).as_py()) and not (self._has_point and self._has_plain)

    @staticmethod
    def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array | None:
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            return None


def _are_exact(integers: pa.Array) -> bool:
    """Whether a double has the value of each."""
    found = pc.min_max(integers)
    return bool(found["min"].as_py() >= -_MAX_EXACT and found["max"].as_py() <= _MAX_EXACT)


def _all_equal(numbers: pa.Array, texts: pa.Array) -> bool:
    return bool(pc.all(pc.equal(numbers.cast(pa.string()), texts)).as_py())


def read_csv(source: Source, spool: Spool, columns: CsvColumns) -> tuple[list[str], str, str]:
    """Add the rows of a CSV file to the spool, all fields as text. Returns the names of its columns, by what its fields
    are separated, in words, and the hash of the file.

    Raises `UnreadableSourceError`, and what storage raises.
    """
    bad: list[Any] = []
    with source.text() as (text, raw):
        names, delimiter, _ = _header(text, source)
        end = secrets.token_hex(16)
        rows = _WithLastRow(text, (delimiter.join([end] * len(names)) + "\n").encode())
        last: pa.RecordBatch | None = None
        try:
            for batch in _batches(rows, names, delimiter, bad):
                if last is not None:
                    _add(last, spool, columns)
                last = batch
        except pa.ArrowInvalid as error:
            raise _unreadable(source, error, bad, len(names), delimiter) from None
        assert last is not None, "the last row is always there"
        if {value.as_py() for value in (column[-1] for column in last.columns)} != {end}:
            raise UnreadableSourceError(
                f"line {_open_quote_line(source, delimiter)}: a quote is opened there and not closed before the end of "
                "the file. Close it, or write it twice if it is a part of the text."
            )
        _add(last.slice(0, last.num_rows - 1), spool, columns)
        return names, _DELIMITERS[delimiter], raw.sha256()


def _add(batch: pa.RecordBatch, spool: Spool, columns: CsvColumns) -> None:
    if batch.num_rows:
        columns.add(batch)
        spool.add(batch)


def _batches(file: Any, names: list[str], delimiter: str, bad: list[Any]) -> Iterator[pa.RecordBatch]:
    def refuse(row: Any) -> str:
        bad.append(row)
        return "error"

    # One thread, so that rows are counted.
    read = pcsv.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES, column_names=names)
    parse = pcsv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refuse)
    convert = pcsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        check_utf8=False,  # `TextFile` does, and knows the place
    )
    with pcsv.open_csv(file, read, parse, convert) as reader:
        yield from reader


class _WithLastRow(io.RawIOBase):
    """A text with one more row at its end. A quote that is not closed swallows the row."""

    def __init__(self, text: TextFile, row: bytes) -> None:
        self._text, self._rest = text, b"\n" + row

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        found = self._text.read(size)
        if not found:
            found, self._rest = self._rest, b""
        return found


def _header(text: TextFile, source: Source) -> tuple[list[str], str, int]:
    """Names of the columns, the delimiter, and the number of lines that the header takes; reads the header."""
    first = b""
    while len(first) <= _MAX_HEADER_BYTES and (piece := text.read(_READ_BYTES)):
        first += piece
        if (end := _record_end(first)) is not None:
            break
    else:
        if len(first) > _MAX_HEADER_BYTES:
            raise UnreadableSourceError(
                f"line 1: no end within {_MAX_HEADER_BYTES >> 20} MiB, expected names of columns."
            )
        end = len(first)
    header = first[:end].decode()
    text.put_back(first[end:])
    blank_lines = len(header) - len(header.lstrip("\r\n"))
    if not header.strip():
        raise UnreadableSourceError("no line in it, expected a first line with the names of the columns.")
    delimiter = _delimiter(header, source)
    try:
        names = next(csv.reader([header.strip("\r\n")], delimiter=delimiter))
    except csv.Error:
        raise UnreadableSourceError(
            "line 1: a quote within a name that has none at its start, expected names of columns, those with line "
            'breaks or quotes as "…".'
        ) from None
    return _named(names), delimiter, blank_lines + header.strip("\r\n").count("\n") + 1


def _record_end(text: bytes) -> int | None:
    """Place at which the first record that is not a blank line ends; None when its end is not there yet."""
    start = len(text) - len(text.lstrip(b"\r\n"))
    is_quoted = False
    for place in range(start, len(text)):
        sign = text[place]
        if sign == 34:
            is_quoted = not is_quoted
        elif sign in (10, 13) and not is_quoted:
            if sign == 13 and place + 1 == len(text):
                return None
            return place + 2 if sign == 13 and text[place + 1] == 10 else place + 1
    return None


def _delimiter(header: str, source: Source) -> str:
    """Tab for a TSV file; else the comma, or the only other sign that separates names in a header without commas."""
    outside = "".join(header.split('"')[::2])
    usual = "\t" if source.kind == "TSV" else ","
    others = [sign for sign in _DELIMITERS if sign != usual and sign in outside]
    return others[0] if usual not in outside and len(others) == 1 else usual


def _named(names: list[str]) -> list[str]:
    """The names, with `column_1` and so on for those that are empty, as that of an index of pandas is."""
    if len(names) > _MAX_COLUMNS:
        raise UnreadableSourceError(f"line 1: {len(names)} columns, expected at most {_MAX_COLUMNS}.")
    given = [name or f"column_{number}" for number, name in enumerate(names, 1)]
    repeated = next((name for name in given if given.count(name) > 1), None) if len(set(given)) < len(given) else None
    if repeated is not None:
        raise UnreadableSourceError(f"line 1: has several columns named {shown_name(repeated)!r}. Rename one of them.")
    return given


def _unreadable(
    source: Source, error: pa.ArrowInvalid, bad: list[Any], num_columns: int, delimiter: str
) -> UnreadableSourceError:
    """The error for a file that Arrow refuses."""
    if "straddling" in str(error):
        return UnreadableSourceError(
            f"a row of more than {MAX_ROW_BYTES >> 20} MiB, expected rows that are smaller. A quote that is not closed "
            "makes one row of many."
        )
    if not bad:
        return UnreadableSourceError(f"cannot be read ({str(error).strip()}).")
    row = bad[0]
    line = _line_of(source, delimiter, row.number, row.actual_columns)
    place = f"row {row.number}" if line is None else f"line {line}"
    return UnreadableSourceError(
        f"{place}: {row.actual_columns} fields, expected {num_columns} as in the first line: "
        f"{shown(row.text[:_TEXT_CHARACTERS])}. Put text that holds separators into quotes, or correct the line."
    )


def _line_of(source: Source, delimiter: str, number: int, num_fields: int) -> int | None:
    """Line on which a record begins, by its number behind the header; None where records are found otherwise than by
    Arrow, as with quotes inside of fields without quotes.
    """
    for count, (line, record) in enumerate(_records(source, delimiter), 1):
        if count == number:
            found = sum(part.count(delimiter.encode()) for part in record.split(b'"')[::2]) + 1
            return line if found == num_fields else None
    return None


def _open_quote_line(source: Source, delimiter: str) -> int:
    """Line on which the last record begins."""
    return max((line for line, _ in _records(source, delimiter)), default=1)


def _records(source: Source, delimiter: str) -> Iterator[tuple[int, bytes]]:
    """Records behind the header, as quotes delimit them, each after the number of its first line."""
    with source.text() as (text, _):
        _, _, line = _header(text, source)
        lines = io.BufferedReader(text, _READ_BYTES)
        record, start, is_open = b"", line + 1, False
        while piece := lines.readline():
            line += 1
            if not is_open and not piece.strip(b"\r\n"):
                start = line + 1
                continue
            record += piece
            is_open ^= piece.count(b'"') % 2 == 1
            if not is_open:
                yield start, record
                record, start = b"", line + 1
        if record:
            yield start, record
