"""CSV: no value changes silently, and what is wrong is named by its line."""

from __future__ import annotations

import csv
import io
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError


def types(table: pa.Table) -> dict[str, str]:
    return {column.name: str(column.type) for column in table.schema}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-20", "0"], "int64"),
        (["007", "1"], "string"),
        (["+1"], "string"),
        (["-0", "1"], "string"),
        (["1 "], "string"),
        (["9223372036854775807", "-9223372036854775808"], "int64"),
        (["9223372036854775808"], "string"),
        (["0.5", "1.0", "-2.25"], "double"),
        (["0.5", "1"], "double"),
        (["1", "1.0"], "string"),
        (["1.50"], "string"),
        (["1e5"], "string"),
        (["0.1", "0.30000000000000004"], "double"),
        (["0.12345678901234567890"], "string"),
        (["9007199254740993", "0.5"], "string"),
        (["nan", "1.5"], "string"),
        (["inf"], "string"),
        (["1", "x"], "string"),
        (["true", "false"], "string"),
        (["2024-01-31"], "string"),
        (["12:30"], "string"),
        (["1,000"], "string"),
        (["NA", "null", "None"], "string"),
    ],
)
def test_a_column_is_a_number_only_where_its_text_can_be_had_back(convert: Any, values: list[str], kind: str) -> None:
    file = io.StringIO()
    csv.writer(file).writerows([["x", "y"], *([value, "t"] for value in values)])
    table = convert("CSV", file.getvalue().encode())
    assert types(table) == {"x": kind, "y": "string"}
    expected: list[Any] = values if kind == "string" else [int(v) if kind == "int64" else float(v) for v in values]
    assert table.column("x").to_pylist() == expected


def test_types_hold_for_all_files_and_blocks(convert: Any) -> None:
    rows = b"\n".join(b"%d,%s" % (number, b"t" * 1000) for number in range(20_000))  # more than a block
    table = convert("CSV", b"id,t\n" + rows + b"\n", b"id,t\n007,x\n")
    assert types(table) == {"id": "string", "t": "string"}
    assert table.num_rows == 20_001
    assert table.column("id")[-1].as_py() == "007"
    assert types(convert("CSV", b"id\n" + b"\n".join(b"%d" % number for number in range(20_000)))) == {"id": "int64"}


def test_settings_are_numbers_however_they_are_written(convert: Any) -> None:
    text = b"temperature,seed,id\n0.70,07,07\n1,1,1\n"
    table = convert("CSV", text, numbers=("temperature", "seed"))
    assert types(table) == {"temperature": "double", "seed": "int64", "id": "string"}
    assert types(convert("CSV", b"temperature\nhot\n", numbers=("temperature",))) == {"temperature": "string"}


def test_nothing_is_null_and_quotes_are_empty_text(convert: Any) -> None:
    table = convert("CSV", b'a,b\n1,\n2,""\n,"x"\n,\n')
    assert table.to_pydict() == {"a": [1, 2, None, None], "b": [None, "", "x", None]}


def test_quoted_fields_may_hold_lines_quotes_and_delimiters(convert: Any) -> None:
    table = convert("CSV", b'\xef\xbb\xbfa,"b\nc"\r\n1,"x\ny, ""z"""\r\n\r\n2,5" pipe\r\n')
    assert table.to_pydict() == {"a": [1, 2], "b\nc": ['x\ny, "z"', '5" pipe']}


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (b"a;b\n1;x,y\n", ["a", "b"]),
        (b"a|b\n1|x\n", ["a", "b"]),
        (b"a\tb\n1\tx\n", ["a", "b"]),
        (b"a;b,c\n1;2,3\n", ["a;b", "c"]),
        (b'"a;b"\nx\n', ["a;b"]),
        (b",a\n0,x\n", ["column_1", "a"]),
    ],
)
def test_the_header_says_what_separates_and_names_the_columns(convert: Any, text: bytes, columns: list[str]) -> None:
    assert convert("CSV", text).column_names == columns


def test_tabs_separate_in_tsv(convert: Any) -> None:
    assert convert("TSV", b"a\tb,c\n1\t2,5\n").to_pydict() == {"a": [1], "b,c": ["2,5"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "no line in it, expected a first line with the names"),
        (b"\n\r\n", "no line in it"),
        (b"id,id\n1,2\n", "line 1: has several columns named 'id'"),
        (b"a,b\n1,2\n3\n", "line 3: 1 fields, expected 2 as in the first line: '3'"),
        (b'a,b\n1,"x\ny"\n\n3,4,5\n', "line 5: 3 fields, expected 2"),
        (b'a,b\n1,2\n3,"open\n4,5\n', "line 3: a quote is opened there and not closed"),
        (b'a\n1\n"open\n4\n', "line 3: a quote is opened there and not closed"),
        (b'a\n1\n2\n"', "line 4: a quote is opened there and not closed"),
        (b'a,b\n"1,2\n3,4\n', "fields, expected 2|a quote is opened there"),
        (b"a,b\n1,\xff\n", "byte 6: 0xff is not UTF-8"),
        (b"a,b\n1,\xc3", "byte 6: 0xc3 is not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "byte 0: UTF-16, expected UTF-8.*iconv -f UTF-16"),
        ("a,b\n1,2\n".encode("utf-16-le"), "byte 0: UTF-16"),
        (b"a\n" + b"x" * (17 << 20), "a row of more than 16 MiB"),
        (b"x" * (2 << 20), "line 1: no end within 1 MiB"),
    ],
    ids=range(15),
)
def test_a_file_that_is_wrong_is_refused_with_the_place(convert: Any, text: bytes, expected: str) -> None:
    with pytest.raises(JobRequestError, match=f"(?s)input file 'x': .*{expected}"):
        convert("CSV", text)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8)
FIELD = st.one_of(TEXT, st.integers().map(str), st.floats().map(repr), st.sampled_from(["", "007", "1.0", "-0", "1e5"]))


@settings(max_examples=60)
@given(rows=st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=8))
def test_every_value_is_what_was_written(convert: Any, rows: list[tuple[str, str]]) -> None:
    frame = pd.DataFrame(rows, columns=["a", "b"])
    text = frame.to_csv(index=False, quoting=csv.QUOTE_ALL).encode()
    table = convert("CSV", text)
    for name in ("a", "b"):
        column = table.column(name)
        written = list(frame[name])
        if pa.types.is_string(column.type):
            assert column.to_pylist() == written
        elif pa.types.is_int64(column.type):
            assert list(map(str, column.to_pylist())) == written
        else:
            # the text of a double is its shortest one, with or without ".0" in the whole column
            assert [float(value) for value in written] == column.to_pylist()
            assert {repr(value) for value in column.to_pylist()} >= {value for value in written if value.endswith(".0")}
