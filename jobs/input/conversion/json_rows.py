"""Reads JSON Lines, one object on each line, and files that are one list of objects.

Texts stay texts, also those that look like times, and integers stay integers: Arrow's own reader makes timestamps and
doubles of some. A column has the same type on all lines; integers may stand beside fractions. Objects and lists become
structs and lists where one Arrow type holds all values of the column; else the column holds the JSON of its values.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from ....system.untrusted import parse_json, shown, shown_name
from .source import MAX_ROW_BYTES, Source, TextFile, UnreadableSourceError
from .tables import Spool

_BLOCK_ROWS, _BLOCK_BYTES = 4096, 8 << 20
_READ_BYTES = 1 << 20
_SHOWN_BYTES = 40
_MAX_COLUMNS = 10_000
# Most fields and levels of the type of a column; values of a larger one are kept as JSON.
_MAX_FIELDS, _MAX_LEVELS = 500, 32
_WORDS: Mapping[type, str] = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list",
                              dict: "an object"}  # fmt: skip
_NESTED = {list, dict}
#: Columns of every line of a batch file of OpenAI's API.
_BATCH_COLUMNS = ("custom_id", "method", "url", "body")


@dataclass(slots=True)
class _Column:
    """Facts about the values of one column so far."""

    #: Type of values -> file of the first one, and its line in words.
    first: dict[type, tuple[str, str]] = field(default_factory=dict)
    #: Arrow type of the lists and objects; None for a column without any.
    nested: pa.DataType | None = None
    #: Whether the column holds JSON, since no type holds all its lists and objects.
    is_json: bool = False

    def type(self) -> pa.DataType:
        """The Arrow type of the column."""
        if self.is_json or not self.first or str in self.first:
            return pa.string()
        if bool in self.first:
            return pa.bool_()
        if self.nested is not None:
            return self.nested
        return pa.float64() if float in self.first else pa.int64()


@dataclass(slots=True)
class JsonColumns:
    """Facts about the values of all JSON files of a job."""

    #: Columns whose lists and objects are kept as JSON, since each object of theirs has fields of its own.
    as_json: Collection[str] = ()
    _found: dict[str, _Column] = field(default_factory=dict)

    def json_columns(self) -> list[str]:
        """Columns that hold the JSON of values for which there is no common type."""
        return [name for name, column in self._found.items() if column.is_json and name not in self.as_json]

    def is_batch_file(self) -> bool:
        """Whether the columns are those of a batch file of OpenAI's API."""
        return all(name in self._found for name in _BATCH_COLUMNS)

    def add(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str], file: str) -> pa.RecordBatch:
        """The rows with lists and objects as JSON. `places`: line of each row, in words. `file`: name of the file.

        Raises `UnreadableSourceError`.
        """
        names = dict.fromkeys(name for row in rows for name in row)
        if len(self._found.keys() | names.keys()) > _MAX_COLUMNS:
            raise UnreadableSourceError(f"{places[-1]}: more than {_MAX_COLUMNS} columns, expected at most that.")
        columns = [self._added(name, [row.get(name) for row in rows], places, file) for name in names]
        return pa.RecordBatch.from_arrays(columns, names=list(names)) if names else _empty(len(rows))

    def typed(self, batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
        """A batch that `add` made, with these columns in their types. Raises `UnreadableSourceError`."""
        fields = [pa.field(name, self._found[name].type()) for name in names]
        columns = [self._typed(batch, name) for name in names]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)) if names else batch

    def type_of(self, name: str) -> pa.DataType:
        """The type of a column."""
        return self._found[name].type()

    def _typed(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        kind, place = self._found[name].type(), batch.schema.get_field_index(name)
        if place < 0:
            return pa.nulls(batch.num_rows, kind)
        values = batch.column(place)
        if t.is_nested(kind):
            return pa.array([None if text is None else json.loads(text) for text in values.to_pylist()], kind)
        try:
            return values.cast(kind)
        except pa.ArrowInvalid as error:
            raise UnreadableSourceError(f"column {shown_name(name)!r}: {error}. {_AS_TEXT}") from None

    def _added(self, name: str, values: list[Any], places: Sequence[str], file: str) -> pa.Array:
        column = self._found.setdefault(name, _Column(is_json=name in self.as_json))
        kinds = set(map(type, values))
        kinds.discard(type(None))
        if kinds - column.first.keys():
            for place, value in zip(places, values, strict=True):
                if value is not None:
                    column.first.setdefault(type(value), (file, place))
        self._check_kinds(name, column)
        if not kinds:
            return pa.nulls(len(values))
        if kinds & _NESTED:
            if not column.is_json:
                column.nested = _wider(column.nested, values)
                column.is_json = column.nested is None
            values = [value if value is None or isinstance(value, str) else _json(value) for value in values]
        try:
            found = pa.array(values, pa.float64() if float in kinds else pa.int64() if int in kinds else None)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
            raise _unfit(name, values, kinds, places) from None
        if float in kinds and pc.any(pc.is_inf(found)).as_py():
            at = pc.index(pc.is_inf(found), True).as_py()
            raise UnreadableSourceError(f"{places[at]}: column {shown_name(name)!r} has a number that no double holds.")
        return found

    def _check_kinds(self, name: str, column: _Column) -> None:
        """Raise `UnreadableSourceError` for a column with values of several types."""
        places = {_WORDS[kind]: place for kind, place in column.first.items()}
        if name in self.as_json and not places.keys() & {"a number", "a boolean"}:
            return
        if len(places) > 1:
            in_files = len({file for file, _ in places.values()}) > 1
            found = (f"{word} at {line}" + f" of {file!r}" * in_files for word, (file, line) in places.items())
            raise UnreadableSourceError(
                f"column {shown_name(name)!r}: {', '.join(found)}. Give all its values one type."
            )


_AS_TEXT = "Write the column's values as text, in quotes."


def _empty(num_rows: int) -> pa.RecordBatch:
    """Rows without columns. Arrow keeps no count of them, so a column of nulls does."""
    return pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=["column_1"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _wider(known: pa.DataType | None, values: list[Any]) -> pa.DataType | None:
    """The type that holds these values, and all of type `known`; None when there is none."""
    objects = [value for value in values if type(value) is dict]
    if objects and len(set().union(*objects)) > _MAX_FIELDS:
        return None
    try:
        found = pa.array(values).type
        if known is not None and found != known:
            pair = [pa.schema([pa.field("x", kind)]) for kind in (known, found)]
            found = pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError):
        return None
    return found if _is_usual(found) else None


def _is_usual(kind: pa.DataType) -> bool:
    """Whether a type has few fields and levels, and no struct without fields, which Parquet does not have."""
    waiting, num_fields = [(kind, 1)], 0
    while waiting:
        kind, level = waiting.pop()
        num_fields += 1
        if level > _MAX_LEVELS or num_fields > _MAX_FIELDS or (t.is_struct(kind) and not kind.num_fields):
            return False
        waiting += [(kind.field(place).type, level + 1) for place in range(kind.num_fields)]
    return True


def _unfit(name: str, values: list[Any], kinds: set[type], places: Sequence[str]) -> UnreadableSourceError:
    """The error for the first value that Arrow cannot hold."""
    for place, value in zip(places, values, strict=True):
        try:
            pa.array([value], pa.float64() if float in kinds else None)
        except UnicodeEncodeError:
            return UnreadableSourceError(
                f"{place}: column {shown_name(name)!r} has half of a surrogate pair, which is no text. Leave it out."
            )
        except (pa.ArrowInvalid, OverflowError):
            return UnreadableSourceError(
                f"{place}: column {shown_name(name)!r} is {shown(value)}, which no number of 64 bits holds"
                f"{' beside fractions' if float in kinds else ''}. {_AS_TEXT}"
            )
    return UnreadableSourceError(f"column {shown_name(name)!r}: its values have no common type. {_AS_TEXT}")


def read_json_lines(source: Source, spool: Spool, columns: JsonColumns) -> tuple[list[str], str]:
    """Add the rows of a file to the spool. Returns the names of its columns, in the order of their first lines, and the
    hash of the file.

    Raises `UnreadableSourceError`, and what storage raises.
    """
    names: dict[str, None] = {}
    with source.text() as (text, raw):
        for rows, places in _blocks(text):
            batch = columns.add(rows, places, source.name)
            if batch.schema.names == ["column_1"] and "column_1" not in rows[0]:
                raise UnreadableSourceError(f"{places[0]}: an object without fields, expected a column with a prompt.")
            names |= dict.fromkeys(batch.schema.names)
            spool.add(batch)
        return list(names), raw.sha256()


def _blocks(text: TextFile) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Rows in blocks, and the place of each."""
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    num_bytes = 0
    for place, item in _items(text):
        rows.append(_row(item, place))
        places.append(place)
        num_bytes += len(item)
        if len(rows) == _BLOCK_ROWS or num_bytes >= _BLOCK_BYTES:
            yield rows, places
            rows, places, num_bytes = [], [], 0
    if rows:
        yield rows, places


def _items(text: TextFile) -> Iterator[tuple[str, bytes]]:
    """The JSON of each row, after its place: an entry where the file is a list, else a line that is not blank."""
    number, is_first, lines = 0, True, io.BufferedReader(text, _READ_BYTES)
    while line := lines.readline(MAX_ROW_BYTES + 1):
        number += 1
        if is_first and line.lstrip().startswith(b"["):
            yield from _entries(lines, line.lstrip()[1:])
            return
        if len(line) > MAX_ROW_BYTES:
            raise _too_long(f"line {number}")
        if line.strip():
            is_first = False
            yield f"line {number}", line


def _entries(file: io.BufferedReader[TextFile], begun: bytes) -> Iterator[tuple[str, bytes]]:
    """The JSON of each entry of a list, which is found by its commas and brackets. `begun`: what was read of the list,
    without its first bracket.
    """
    entry, number, depth, in_text = bytearray(), 1, 0, False
    while begun:
        # a backslash and its sign stay together
        if (len(begun) - len(begun.rstrip(b"\\"))) % 2:
            begun += file.read(1)
        start = 0
        for match in _SIGNS.finditer(begun):
            sign = match[0]
            if sign == b'"':
                in_text = not in_text
            elif in_text or len(sign) > 1:
                continue
            elif sign in b"[{":
                depth += 1
            elif depth and sign in b"]}":
                depth -= 1
            elif not depth and sign != b"}":
                entry += begun[start : match.start()]
                if sign == b"," or entry.strip() or number > 1:
                    yield f"entry {number}", bytes(entry)
                if sign != b",":
                    _check_end(begun[match.end() :], file)
                    return
                entry.clear()
                number, start = number + 1, match.end()
        entry += begun[start:]
        if len(entry) > MAX_ROW_BYTES:
            raise _too_long(f"entry {number}")
        begun = file.read1(_READ_BYTES)
    raise UnreadableSourceError(f"entry {number}: the list has no end, expected ']'. The file may be cut off.")


# Signs that end or nest an entry, and pairs with a backslash.
_SIGNS = re.compile(rb'\\.|["\[\]{},]', re.DOTALL)


def _check_end(rest: bytes, file: io.BufferedReader[TextFile]) -> None:
    while rest:
        if rest.strip():
            found = shown(rest.strip()[:_SHOWN_BYTES].decode(errors="replace"))
            raise UnreadableSourceError(
                f"text behind the list: {found}. Take it out, or write one object on each line."
            )
        rest = file.read1(_READ_BYTES)


def _too_long(place: str) -> UnreadableSourceError:
    return UnreadableSourceError(f"{place}: more than {MAX_ROW_BYTES >> 20} MiB, expected at most that.")


def _row(item: bytes, place: str) -> dict[str, Any]:
    try:
        value = parse_json(item.decode(), object_pairs_hook=_each_once, parse_constant=_no_number)
    except ValueError as error:
        if place == "line 1" and item.strip() == b"{":
            raise UnreadableSourceError(f"{place}: JSON on several lines, {_ONE_LINE}") from None
        what = "line" if place.startswith("line") else "entry"
        raise UnreadableSourceError(f"{place}: not valid JSON ({error}). Correct the {what}.") from None
    if not isinstance(value, dict):
        word = "null" if value is None else _WORDS[type(value)]
        raise UnreadableSourceError(
            f"{place}: {word}, expected an object with a field for each column. Correct it or take it out."
        )
    return value


_ONE_LINE = "expected one object on each line, or a list of objects. Convert it, for example: jq -c . FILE > rows.jsonl"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {shown(next(name for name in names if names.count(name) > 1))} is given twice")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON; write null")
