"""JSON Lines: values as they are written, types that all lines share, and what is wrong by its line."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.conversion import json_rows


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def types(table: pa.Table) -> dict[str, str]:
    return {column.name: str(column.type) for column in table.schema}


def test_texts_that_look_like_times_and_large_integers_stay_what_they_are(convert: Any) -> None:
    rows = [{"t": "2024-01-31 12:30:00", "n": 2**63 - 1, "x": 0.1, "b": True}]
    table = convert("JSON Lines", lines(*rows))
    assert types(table) == {"t": "string", "n": "int64", "x": "double", "b": "bool"}
    assert table.to_pylist() == rows


VALUES = st.recursive(
    st.text('[]{},"\\\\ \\n', max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5), st.sampled_from([None, 0, 2]), st.integers(1, 9))
def test_a_file_that_is_one_list_has_the_rows_of_its_lines(
    convert: Any, values: list[Any], indent: int | None, read_bytes: int
) -> None:
    rows = [{"id": number, "value": json.dumps(value)} for number, value in enumerate(values)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_READ_BYTES", read_bytes)
        listed = convert("JSON Lines", f" \n{json.dumps(rows, indent=indent)}\n ".encode())
    assert listed.to_pylist() == rows
    assert listed.schema == convert("JSON Lines", lines(*rows)).schema


def test_an_empty_list_has_no_rows(convert: Any) -> None:
    assert convert("JSON Lines", b"[ ]\n", lines({"a": 1})).to_pylist() == [{"a": 1}]


def test_fields_may_come_late_and_lack_anywhere(convert: Any) -> None:
    many = [{"id": number} for number in range(5000)]  # more than a block
    table = convert("JSON Lines", lines(*many, {"late": "x"}, {"id": None}), lines({"other": [1]}))
    assert types(table) == {"id": "int64", "late": "string", "other": "list<element: int64>"}
    assert table.slice(4999).to_pylist() == [
        {"id": 4999, "late": None, "other": None},
        {"id": None, "late": "x", "other": None},
        {"id": None, "late": None, "other": None},
        {"id": None, "late": None, "other": [1]},
    ]


def test_integers_beside_fractions_are_doubles_across_blocks_too(convert: Any) -> None:
    table = convert("JSON Lines", lines(*[{"x": 1}] * 5000, {"x": 0.5}))
    assert types(table) == {"x": "double"}
    with pytest.raises(JobRequestError, match="9007199254740993"):
        convert("JSON Lines", lines(*[{"x": 2**53 + 1}] * 5000, {"x": 0.5}))


def test_objects_and_lists_are_structs_and_lists(convert: Any) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "o": {"a": 1}},
        {"messages": [{"role": "user", "content": "b", "name": "n"}], "o": {"b": {"c": [0.5]}}},
        {"messages": [], "o": None},
    ]
    table = convert("JSON Lines", lines(*rows))
    assert pa.types.is_list(table.schema.field("messages").type)
    assert table.to_pylist() == [
        {"messages": [{"role": "user", "content": "a", "name": None}], "o": {"a": 1, "b": None}},
        {"messages": [{"role": "user", "content": "b", "name": "n"}], "o": {"a": None, "b": {"c": [0.5]}}},
        {"messages": [], "o": None},
    ]


@pytest.mark.parametrize(
    "values",
    [
        [[{"content": "a"}], [{"content": [{"type": "text"}]}]],
        [{}, {}],
        [{"a": 1}, {"a": "x"}],
        [{str(number): 1} for number in range(600)],
        [json.loads("[" * 40 + "]" * 40)],
        [[2**64]],
    ],
    ids=["contents", "empty", "types", "fields", "levels", "large"],
)
def test_values_without_a_common_type_are_kept_as_their_json(convert: Any, values: list[Any]) -> None:
    table = convert("JSON Lines", lines(*({"x": value} for value in values)))
    assert types(table) == {"x": "string"}
    assert list(map(json.loads, table.column("x").to_pylist())) == values


def test_settings_with_objects_of_their_own_are_json(convert: Any) -> None:
    rows = [{"tools": [{"a": 1}]}, {"tools": '[{"b": null}]'}, {"tools": None}]
    table = convert("JSON Lines", lines(*rows), as_json=("tools",))
    assert table.column("tools").to_pylist() == ['[{"a":1}]', '[{"b": null}]', None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": 1}\n\n[1]\n', "line 3: a list, expected an object"),
        (b'{"a": 1}\nnull\n', "line 2: null, expected an object"),
        (b'{"a": 1}\n"x"\n', "line 2: text, expected an object"),
        (b'[{"a": 1}, 2]', "entry 2: a number, expected an object"),
        (b'\n [{"a": 1},\n]', "entry 2: not valid JSON"),
        (b'[{"a": 1}, {"a": "x]}]', "entry 2: the list has no end, expected ']'"),
        (b'[{"a": 1}]\n[{"a": 2}]', "text behind the list: '.*Take it out, or write one object on each line"),
        (b'[{"a": 1}}]', "entry 1: not valid JSON"),
        (b"[}", "entry 1: the list has no end"),
        (b'[{"a": 1}, {"a": "x"}]', "column 'a': a number at entry 1, text at entry 2"),
        (b'[{"a": "' + b"x" * (17 << 20) + b'"}]', "entry 1: more than 16 MiB"),
        (b'[{"a": 1}, {"a": "\\', "entry 2: the list has no end"),
        (b'{\n"a": 1}', "line 1: JSON on several lines"),
        (b'{"a": 1', "line 1: not valid JSON"),
        (b'{"a": 1} {"a": 2}', "line 1: not valid JSON"),
        (b'{"a": 1, "a": 2}', "line 1: not valid JSON \\(field 'a' is given twice"),
        (b'{"o": {"a": 1, "a": 2}}', "field 'a' is given twice"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": 1e999}', "line 1: column 'a' has a number that no double holds"),
        (b'{"a": 9223372036854775808}', "line 1: column 'a' is 9223372036854775808, which no number of 64 bits holds"),
        (b'{"a": 1}\n{"a": "x"}\n', "column 'a': a number at line 1, text at line 2"),
        (b'{"a": true}\n{"a": 1}\n', "column 'a': a boolean at line 1, a number at line 2"),
        (b'{"a": [1]}\n{"a": {"b": 1}}\n', "column 'a': a list at line 1, an object at line 2"),
        (b'{"a": "\\ud800"}', "line 1: column 'a' has half of a surrogate pair"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', "byte 18: 0xff is not UTF-8"),
        (b"{}\n", "line 1: an object without fields"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: not valid JSON \\(it nests too deeply"),
        (b'{"a": "' + b"x" * (17 << 20) + b'"}', "line 1: more than 16 MiB"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number of 100000 digits"),
        (b"{" + b",".join(b'"k%d": 1' % number for number in range(10_001)) + b"}", "line 1: more than 10000 columns"),
        (lines({"custom_id": "1", "method": "POST", "url": "/v1", "body": {"a": 1}}), "lorabatch import FILE.jsonl"),
    ],
    ids=range(31),
)
def test_a_line_that_is_wrong_is_named(convert: Any, text: bytes, expected: str) -> None:
    with pytest.raises(JobRequestError, match=f"(?s)input.*{expected}"):
        convert("JSON Lines", text)


def test_types_that_differ_by_file_are_named_with_the_files(convert: Any) -> None:
    with pytest.raises(JobRequestError, match=r"column 'a': a number at line 1, text at line 2. Give"):
        convert("JSON Lines", b'{"a": 1}\n', b'{"b": 1}\n{"a": "x"}\n')


TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
SCALARS = st.one_of(
    st.lists(st.none() | TEXT, max_size=5),
    st.lists(st.none() | st.booleans(), max_size=5),
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    st.lists(st.none() | st.lists(TEXT | st.none(), max_size=3), max_size=5),
    st.lists(st.none() | st.fixed_dictionaries({"a": TEXT, "b": st.lists(st.integers(-9, 9))}), max_size=5),
)


@settings(max_examples=60)
@given(columns=st.dictionaries(TEXT.filter(bool), SCALARS, min_size=1, max_size=3))
def test_every_value_is_what_was_written(convert: Any, columns: dict[str, list[Any]]) -> None:
    num_rows = max(map(len, columns.values()))
    rows = [{n: v[i] if i < len(v) else None for n, v in columns.items()} for i in range(num_rows)]
    table = convert("JSON Lines", lines(*rows))
    assert table.to_pylist() == rows
