"""Columns are unchanged in type and value, whoever wrote them and whoever reads them, or are refused by name."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.column_types import ARROW_TYPES
from lorabatch.jobs.input.parquet_schema import CONVERTED_TYPES, LOGICAL_TYPES
from lorabatch.jobs.status.notes import job_notes
from lorabatch.pipeline.dataset.writer import answers_in_part, empty_part, part_bytes

Prepare = Callable[..., Any]
Echo = Callable[..., Any]
FAR, FIRST, NEAR = dt.datetime(9999, 12, 31, 23, 59, 59), dt.datetime(1, 1, 1), dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
US = pa.timestamp("us")
ID = {"id": ["a", "b", "c"], "prompt": ["x", "y", "z"]}


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def by_duckdb(folder: Path, columns: str, more: str = "") -> bytes:
    path = folder / "duckdb.parquet"
    rows = f"SELECT chr(97 + i::int) AS id, 'x' AS prompt, {columns} FROM range(3) t(i)"
    duckdb.sql(f"COPY ({rows}) TO '{path}' (FORMAT parquet {more})")
    return path.read_bytes()


@pytest.fixture
def copied(prepare_job: Prepare, answer_by_echo: Echo, tmp_path: Path) -> Callable[..., Path]:
    """`copied(bytes or {name: bytes}, **options)`: the output of a job over these files."""

    def make(files: bytes | Mapping[str, bytes | pa.Table], **options: Any) -> Path:
        given = {"in.parquet": files} if isinstance(files, bytes) else files
        job = prepare_job(given, rows_per_shard=1000, **{"row_settings": (), **options})
        for rows in job.shards():
            part = part_bytes(rows, answer_by_echo(rows), job.record)
            assert answers_in_part(io.BytesIO(part), rows, job.record) == answer_by_echo(rows)
            assert job.store.commit_part(rows.shard_id, part)
        empty = pq.read_schema(io.BytesIO(empty_part(job.record, "run")))
        assert empty.equals(pq.read_schema(io.BytesIO(part)))
        for name, data in given.items():
            (tmp_path / Path(name).name).write_bytes(parquet(data) if isinstance(data, pa.Table) else data)
        return Path(job.store.url)

    return make


def as_duckdb_reads(source: str, names: list[str]) -> tuple[list[Any], list[Any]]:
    shown, plain = ", ".join(f'"{name}"::VARCHAR' for name in names), ", ".join(f'"{name}"' for name in names)
    types = duckdb.sql(f"DESCRIBE SELECT {plain} FROM '{source}'").fetchall()
    return [kind[:2] for kind in types], duckdb.sql(f"SELECT {shown} FROM '{source}' ORDER BY id").fetchall()


def as_pandas_reads(path: Path, names: list[str]) -> list[Any]:
    frame = pd.read_parquet(path, columns=names).sort_values("id")
    values = [[str(v) for v in frame[name]] for name in names]
    return [[str(frame[name].dtype) for name in names], values]


def as_polars_reads(path: Path, names: list[str]) -> Any:
    frame = polars.read_parquet(path, columns=names).sort("id")
    return [str(kind) for kind in frame.dtypes], [list(map(str, row)) for row in frame.rows()]


DEEP = pa.struct([("k", pa.list_(pa.int8())), ("to", US)])
PYARROW = {
    "i": pa.array([1, None, 3], pa.uint8()),
    "f16": pa.array([np.float16(1.5), None, np.float16(2.5)], pa.float16()),
    "text": pa.array(["a", None, ""], pa.large_string()),
    "raw": pa.array([b"a", None, b""], pa.binary()),
    "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "money": pa.array([Decimal("1.50"), None, Decimal("-2.25")], pa.decimal128(9, 2)),
    "large_money": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal256(50, 2)),
    "day": pa.array([dt.date(1, 1, 1), None, dt.date(9999, 12, 31)]),
    "clock": pa.array([dt.time(1, 2, 3, 4), None, dt.time(0)], pa.time64("us")),
    "near": pa.array([1, None, -1], pa.timestamp("ns")),
    "far": pa.array([FAR, None, FIRST], US),
    "zoned": pa.array([NEAR, None, NEAR], pa.timestamp("us", "Asia/Tokyo")),
    "coarse": pa.array([NEAR.replace(microsecond=0), None, FIRST], pa.timestamp("ms")),
    "span": pa.array([1, None, 3], pa.duration("ms")),
    "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=9).bytes], pa.binary(16)).cast(pa.uuid()),
    "json": pa.array(['{"a": 1}', None, "[]"], pa.json_()),
    "nothing": pa.nulls(3),
    "yes": pa.array([True, None, False]),
    "deep": pa.array([[{"k": [1, None], "to": FAR}], None, []], pa.list_(DEEP)),
    "map": pa.array([[("a", FIRST)], None, []], pa.map_(pa.string(), US)),
    "ids": pa.array([[uuid.UUID(int=7).bytes], None, []], pa.list_(pa.binary(16))).cast(pa.list_(pa.uuid())),
    "three": pa.array([[1, 2, 3], None, [4, 5, 6]], pa.list_(pa.int32(), 3)),
}  # fmt: skip
BY_DUCKDB = """
    i::UTINYINT AS u8, i::HUGEINT AS huge, (i / 2)::DECIMAL(4, 2) AS money, DATE '0001-01-01' + i::int AS day,
    TIME '10:00:00' AS clock, TIMESTAMP '9999-12-31 23:59:59' AS far, TIMESTAMPTZ '2026-01-01 00:00:00+02' AS zoned,
    TIMESTAMP_NS '2026-01-01 00:00:00.123456789' AS fine, TIMESTAMP_MS '0001-01-01 00:00:00' AS coarse,
    '7b7e5a3e-0000-4000-8000-000000000001'::UUID AS uuid, '{"a": 1}'::JSON AS json, 'x'::BLOB AS raw,
    ['7b7e5a3e-0000-4000-8000-000000000001'::UUID] AS uuids, {'a': '{}'::JSON} AS inside, MAP {'a': 1} AS map,
    'a'::ENUM('a', 'b') AS kind, TRUE AS yes, NULL AS nothing
"""


@pytest.mark.parametrize("writer", ["pyarrow", "pyarrow without its schema", "duckdb", "duckdb v2", "pandas", "polars"])
def test_types_and_values_are_those_of_the_input(copied: Callable[..., Path], tmp_path: Path, writer: str) -> None:
    if writer.startswith("pyarrow"):
        table = pa.table(ID | PYARROW)
        data = parquet(table, store_schema=writer == "pyarrow")
    elif writer.startswith("duckdb"):
        data = by_duckdb(tmp_path, BY_DUCKDB, ", parquet_version v2" if writer.endswith("v2") else "")
    elif writer == "pandas":
        frame = pd.DataFrame(
            ID
            | {
                "whole": pd.array([1, None, 3], "Int64"),
                "kind": pd.Categorical(["u", "v", "u"], ["v", "u", "w"]),
                "when": pd.to_datetime(["2026-01-01", None, "1999-05-05"]),
                "flag": pd.array([True, None, False], "boolean"),
                "list": [np.array([1]), None, np.array([])],
            }
        )
        sink = io.BytesIO()
        frame.to_parquet(sink)
        data = sink.getvalue()
    else:
        kinds = {"kind": polars.Categorical, "deep": polars.List(polars.String), "when": polars.Datetime("us")}
        frame = polars.DataFrame(
            ID | {"kind": ["u", None, "v"], "deep": [["a"], None, []], "when": [FAR, None, FIRST]},
            schema_overrides=kinds,
        )
        sink = io.BytesIO()
        frame.write_parquet(sink)
        data = sink.getvalue()
    output = copied(data) / "part-00000.parquet"
    given = tmp_path / "in.parquet"
    names = [name for name in pq.read_schema(given).names if name in pq.read_schema(output).names]
    assert len(names) > 4
    assert as_duckdb_reads(f"{output}", names) == as_duckdb_reads(f"{given}", names)
    in_pyarrow = pq.read_table(given), pq.read_table(output).sort_by("id").select(names)
    assert in_pyarrow[1].to_pylist() == in_pyarrow[0].to_pylist()
    same = [t for t in in_pyarrow[0].schema.types if not pa.types.is_dictionary(t)]
    assert [t for t in in_pyarrow[1].schema.types if not pa.types.is_dictionary(t)] == same
    readable = [name for name in names if name not in ("ids", "uuids")]  # pandas reads no lists of them
    assert as_pandas_reads(output, readable) == as_pandas_reads(given, readable)
    some = [name for name in names if name not in ("nothing", "large_money")]
    assert as_polars_reads(output, some) == as_polars_reads(given, some)


@pytest.mark.parametrize("has_schema", [True, False])
@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0", "use_dictionary": False}])
def test_int96_timestamps_of_any_year_keep_their_instants(
    copied: Callable[..., Path], tmp_path: Path, has_schema: bool, options: dict[str, Any]
) -> None:
    values = [FAR, FIRST, None]
    columns = {
        "plain": pa.array(values, US),
        "zoned": pa.array([NEAR, FAR, None], pa.timestamp("us", "UTC")),
        "list": pa.array([[FAR, None], [], [NEAR]], pa.list_(US)),
        "struct": pa.array([{"to": FAR}, None, {"to": FIRST}], pa.struct([("to", US)])),
        "map": pa.array([[("a", FIRST)], None, []], pa.map_(pa.string(), US)),
        "a.b": pa.array(values, US),
    }
    data = parquet(pa.table(ID | columns), use_deprecated_int96_timestamps=True, store_schema=has_schema, **options)
    output = copied(data) / "part-00000.parquet"
    names = list(columns)
    assert as_duckdb_reads(f"{output}", names) == as_duckdb_reads(f"{tmp_path / 'in.parquet'}", names)
    found = pq.read_table(output).sort_by("id")
    assert found.column("plain").to_pylist() == values
    assert found.column("list").to_pylist() == [[FAR, None], [], [NEAR]]
    assert found.column("a.b").to_pylist() == values


@pytest.mark.parametrize("column", [
    pa.array([1], pa.timestamp("ns")), pa.array([[1]], pa.list_(pa.timestamp("ns"))),
    pa.array([{"x": 1}], pa.struct([("x", pa.timestamp("ns"))])),
])  # fmt: skip
def test_int96_timestamps_with_nanoseconds_are_refused_by_name(prepare_job: Prepare, column: pa.Array) -> None:
    table = pa.table({"prompt": ["a"], "fine": column})
    job = prepare_job({"x.parquet": parquet(table, use_deprecated_int96_timestamps=True)})
    assert [note for note in job_notes(job.record) if "INT96" in note and note.endswith("NTZ: fine")]
    (summary,) = job.index()
    (damage,) = summary.damages[0]
    assert "column 'fine' has INT96 timestamps with nanoseconds" in damage
    assert "--drop fine" in damage
    job = prepare_job({"x.parquet": parquet(table, use_deprecated_int96_timestamps=True)}, drop=["fine"])
    assert not [note for note in job_notes(job.record) if "INT96" in note]
    (summary,) = job.index()
    assert summary.damages == {}


def by_spark(columns: dict[str, Any], fields: Any = (), **options: Any) -> bytes:
    """A file with a footer like Spark's. `fields`: of its JSON schema. `options`: of the footer and of the writer."""
    schema = {"type": "struct", "fields": [{"nullable": True, "metadata": {}, **field} for field in fields]}
    metadata = {"org.apache.spark.version": "3.5.1", "org.apache.spark.sql.parquet.row.metadata": json.dumps(schema)}
    metadata |= {f"org.apache.spark.{key}": options.pop(key) for key in ("version", *OLD) if key in options}
    table, sink = pa.table(ID | columns), io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: text for key, text in metadata.items() if text is not None})
    return sink.getvalue()


OLD = ("legacyDateTime", "legacyINT96")
VECTOR = {"type": "udt", "class": "org.apache.spark.ml.linalg.VectorUDT", "sqlType": {"type": "struct", "fields": []}}
INTERVALS = {"type": "array", "elementType": "interval day to second", "containsNull": True}
KEYS = {"type": "map", "keyType": "interval year to month", "valueType": "string", "valueContainsNull": True}
VARIANT = {"type": "struct", "fields": [{"name": "v", "type": "variant", "nullable": True, "metadata": {}}]}
PLAIN = [
    "boolean", "byte", "short", "integer", "long", "float", "double", "string", "binary", "date", "timestamp",
    "timestamp_ntz", "decimal(9,2)", "char(3)", "varchar(9)", "time(6)",
    {"type": "array", "elementType": "string", "containsNull": True},
    {"type": "map", "keyType": "string", "valueType": "decimal(38,10)", "valueContainsNull": True},
    {"type": "struct", "fields": [{"name": "x", "type": "date", "nullable": True, "metadata": {}}]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"type": "interval day to second"}, "interval day to second"),
        ({"type": INTERVALS}, "interval day to second"),
        ({"type": KEYS}, "interval year to month"),
        ({"type": VARIANT}, "variant"),
        ({"type": VECTOR}, "udt org.apache.spark.ml.linalg.VectorUDT"),
        ({"type": "string", "metadata": {"__COLLATIONS": {"c": "spark.UTF8_LCASE"}}}, "text with a collation"),
        ({"type": "geometry(4326)"}, "geometry(4326)"),
        ({"type": "void"}, "void"),
    ],
)
def test_types_that_only_spark_shows_are_refused_by_name(copied: Callable[..., Path], field: Any, said: str) -> None:
    data = by_spark({"c": [1, 2, 3], "other": [1, 2, 3]}, [{"name": "c", **field}, {"name": "other", "type": "long"}])
    with pytest.raises(JobRequestError) as caught:
        copied(data)
    (problem,) = caught.value.problems
    assert problem.startswith(f"input column 'c': {said} in 'in.parquet', a type of Spark that would be lost")
    assert problem.endswith("--drop c.")
    names = pq.read_schema(copied(data, drop=["c"]) / "part-00000.parquet").names
    assert names[:3] == ["id", "prompt", "other"]


def test_types_of_spark_that_parquet_shows_are_copied(prepare_job: Prepare) -> None:
    fields = [{"name": f"c{i}", "type": kind} for i, kind in enumerate(PLAIN)]
    columns = {field["name"]: [1, 2, 3] for field in fields}
    job = prepare_job({"a.parquet": by_spark(columns, fields)})
    assert not job.record.input.metadata_left_out
    with_comment = by_spark(columns, [*fields[1:], fields[0] | {"metadata": {"comment": "x"}}])
    assert prepare_job({"a.parquet": with_comment}).record.input.metadata_left_out
    for text in ("no JSON", "[]", '{"fields": [3]}', '{"fields": [{"name": "c0", "type": {}}]}'):
        table = pa.table(ID).replace_schema_metadata({"org.apache.spark.sql.parquet.row.metadata": text})
        assert prepare_job({"a.parquet": parquet(table)}).index()[0].damages == {}


DAY, TIME = dt.date(1582, 10, 14), dt.datetime(1899, 12, 31, 23, 59, 59)
OLD_VALUES = {
    "date": pa.array([None, DAY, dt.date(2026, 1, 1)]),
    "list": pa.array([[dt.date(2026, 1, 1)], None, [DAY]]),
    "map": pa.array([[(DAY, 1)], None, []], pa.map_(pa.date32(), pa.int8())),
    "timestamp": pa.array([NEAR, None, TIME], US),
    "millis": pa.array([TIME, None, NEAR], pa.timestamp("ms", "UTC")),
    "struct": pa.array([{"t": TIME}, None, {"t": None}], pa.struct([("t", US)])),
}


@pytest.mark.parametrize("name", OLD_VALUES)
def test_old_days_of_the_julian_calendar_are_refused_by_name(prepare_job: Prepare, name: str) -> None:
    def damage(**options: Any) -> str | None:
        drop = options.pop("drop", ())
        data = by_spark({"c": OLD_VALUES[name], "new": pa.array([NEAR, NEAR, None], US)}, **options)
        (summary,) = prepare_job({"x.parquet": data}, drop=drop).index()
        return summary.damages[0][0] if summary.damages else None

    is_int96 = {"use_deprecated_int96_timestamps": True}
    has_int96 = name in ("timestamp", "millis", "struct")
    cases = [{"legacyDateTime": ""}, {"version": "2.4.8"}]
    for options in [
        *cases,
        *([{"legacyINT96": "", **is_int96}, {"version": "3.0.3", **is_int96}] if has_int96 else []),
    ]:
        said = damage(**options)
        assert said is not None
        assert "column 'c' has dates before 1582-10-15 or timestamps before 1900" in said
        assert "--drop c" in said
        assert damage(**options, drop=["c"]) is None
    for options in ({}, {"version": None, "legacyDateTime": ""}, {"legacyINT96": ""}, {"version": "4.0.0"}):
        assert damage(**options) is None
    assert damage(**is_int96) is None


def test_days_that_both_calendars_have_are_copied(copied: Callable[..., Path]) -> None:
    columns = {
        "day": pa.array([dt.date(1582, 10, 15), None, dt.date(9999, 12, 31)]),
        "time": pa.array([dt.datetime(1900, 1, 1), None, FAR], US),
        "none": pa.array([None, None, None], pa.date32()),
    }
    for options in ({"legacyDateTime": ""}, {"version": "2.4.0", "use_deprecated_int96_timestamps": True}):
        found = pq.read_table(copied(by_spark(columns, **options)) / "part-00000.parquet").sort_by("id")
        assert {name: found.column(name).to_pylist() for name in columns} == {
            name: column.to_pylist() for name, column in columns.items()
        }


VIEWS = {
    "text": pa.array(["x", None, "y"], pa.string_view()),
    "raw": pa.array([b"x", None, b"y"], pa.binary_view()),
    "list": pa.array([["x"], None, []], pa.list_(pa.string_view())),
    "large": pa.array([["x"], None, []], pa.large_list(pa.binary_view())),
    "struct": pa.array([{"k": "x"}, None, {"k": None}], pa.struct([("k", pa.string_view())])),
    "map": pa.array([[("a", "b")], None, []], pa.map_(pa.string_view(), pa.string_view())),
    "pair": pa.array([["x", "y"], None, ["z", None]], pa.list_(pa.string_view(), 2)),
    "views": pa.array([[1], None, []], pa.list_view(pa.int32())),
    "inner_views": pa.array([[[1], []], None, []], pa.list_(pa.list_view(pa.int32()))),
    "struct_views": pa.array([{"v": [1]}, None, {"v": None}], pa.struct([("v", pa.list_view(pa.int32()))])),
    "large_views": pa.array([[1], None, []], pa.large_list_view(pa.int32())),
}


def test_views_are_read_as_what_they_are_views_of(copied: Callable[..., Path], tmp_path: Path) -> None:
    views = {"id": pa.array(ID["id"], pa.string_view()), "prompt": pa.array(ID["prompt"], pa.string_view()), **VIEWS}
    views["adapter"] = pa.array(["alpha", None, "beta"], pa.string_view())
    output = copied(parquet(pa.table(views)))
    found = pq.read_table(output).sort_by("id")
    assert {name: found.column(name).to_pylist() for name in VIEWS} == {n: v.to_pylist() for n, v in VIEWS.items()}
    assert found.column("error").null_count == 3
    given = as_duckdb_reads(f"{tmp_path / 'in.parquet'}", list(VIEWS))
    assert as_duckdb_reads(f"{output}/*.parquet", list(VIEWS)) == given


def categories(start: int, count: int, index: pa.DataType) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(range(count), index), pa.array([f"k{start + i}" for i in range(count)])
    )


@pytest.mark.parametrize("index", [pa.int8(), pa.uint8(), pa.int32()], ids=str)
def test_categories_may_differ_by_file_and_be_more_than_8_bits_tell_apart(
    copied: Callable[..., Path], index: pa.DataType
) -> None:
    def day(number: int) -> pa.Table:
        kinds = categories(number * 100, 100, index)
        nested = pa.StructArray.from_arrays([kinds, pa.array(range(100))], ["k", "i"])
        lists = pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), kinds)
        ids = [f"r{number * 100 + i}" for i in range(100)]
        return pa.table({"id": ids, "prompt": ["hi"] * 100, "kind": kinds, "nested": nested, "list": lists})

    days = {f"day{number}.parquet": day(number) for number in range(3)}
    (output,) = copied(days).glob("part-*.parquet")
    expected = {row["id"]: row for table in days.values() for row in table.to_pylist()}
    found = pq.read_table(output).select(["id", "prompt", "kind", "nested", "list"])
    assert {row["id"]: row for row in found.to_pylist()} == expected
    assert pd.read_parquet(output)["kind"].dtype == "category"


def test_files_with_other_types_of_categories_or_without_values_go_together(copied: Callable[..., Path]) -> None:
    base = {"id": ["p"], "prompt": ["hi"]}
    files = {
        "a.parquet": pa.table({"id": ["o"], "prompt": ["hi"], "kind": categories(0, 1, pa.int8())}),
        "b.parquet": pa.table(base | {"kind": categories(1, 1, pa.uint16())}),
        "c.parquet": pa.table({"id": ["q"], "prompt": ["hi"], "kind": pa.nulls(1)}),
        "d.parquet": pa.table({"id": ["r"], "prompt": ["hi"]}),
    }
    (output,) = copied(files).glob("part-*.parquet")
    assert pq.read_table(output).sort_by("id").column("kind").to_pylist() == ["k0", "k1", None, None]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("INTERVAL '1 month 2 days'", "INTERVAL"),
        ("[INTERVAL '1 day']", "INTERVAL"),
        ("42::VARIANT", "VARIANT"),
        ("TIMETZ '10:00:00+02' AS a, [TIME '10:00:00']", "time with time zone (microseconds)"),
        ("TIMETZ '10:00:00+02' AS d, TIME '10:00:00'", "time with time zone (microseconds)"),
    ],
)
def test_types_that_would_be_lost_are_refused_before_the_start(
    copied: Callable[..., Path], tmp_path: Path, column: str, said: str
) -> None:
    try:
        data = by_duckdb(tmp_path, f"{column} AS c, 1 AS other")
    except duckdb.CatalogException:
        pytest.skip(f"this DuckDB has no type {said}")
    with pytest.raises(JobRequestError) as caught:
        copied(data)
    (problem,) = caught.value.problems
    match = re.search(r"--drop (\w)", problem)
    assert match is not None
    assert f"input column '{match[1]}': {said} in 'in.parquet'" in problem
    output = copied(data, drop=[match[1]])
    names = pq.read_schema(output / "part-00000.parquet").names
    assert match[1] not in names
    assert "other" in names


def test_times_of_day_in_utc_stay_so(copied: Callable[..., Path], tmp_path: Path) -> None:
    data = by_duckdb(tmp_path, "TIMETZ '10:00:00+02' AS a, [TIMETZ '23:59:59+00'] AS b")
    output = copied(data) / "part-00000.parquet"
    assert as_duckdb_reads(f"{output}", ["a", "b"]) == as_duckdb_reads(f"{tmp_path / 'in.parquet'}", ["a", "b"])


def test_geometries_of_duckdb_are_geometries_in_the_output(copied: Callable[..., Path], tmp_path: Path) -> None:
    try:
        data = by_duckdb(tmp_path, "'POINT(1 2)'::GEOMETRY AS place")
    except duckdb.Error:
        pytest.skip("this DuckDB has no geometries")
    output = copied(data) / "part-00000.parquet"
    assert as_duckdb_reads(f"{output}", ["place"]) == as_duckdb_reads(f"{tmp_path / 'in.parquet'}", ["place"])


def test_the_index_of_a_data_frame_is_its_index_in_the_output(copied: Callable[..., Path]) -> None:
    frame = pd.DataFrame(ID | {"n": pd.array([12, None, 40], "Int64")}, index=pd.Index([5, 6, 7], name="key"))
    sink = io.BytesIO()
    frame.to_parquet(sink)
    found = pd.read_parquet(copied(sink.getvalue()) / "part-00000.parquet").sort_index()
    pd.testing.assert_frame_equal(found[["id", "prompt", "n"]], frame)
    assert found["completion"].notna().all()


@pytest.mark.reference("pyarrow")
def test_every_type_of_arrow_and_parquet_is_classified(unclassified: Callable[[Iterable[str]], None]) -> None:
    of_arrow = {name.removeprefix("Type_") for name in dir(pa.lib) if name.startswith("Type_")}
    unclassified(of_arrow - ARROW_TYPES.keys())
    header = (Path(pa.get_include()) / "parquet" / "types.h").read_text()
    of_parquet = re.findall(r"class PARQUET_EXPORT (\w+)LogicalType : public LogicalType", header)
    names = {name.upper() for name in LOGICAL_TYPES.values()}
    ours = {"INT": "INTEGER", "NULL": "NULL", "BSON": "BINARY", "ENUM": "STRING"}
    # an interval is an older type; `NoLogicalType` is none
    missing = (
        {ours.get(n.upper(), n.upper()) for n in of_parquet if n not in ("No", "Undefined")} - names - {"INTERVAL"}
    )
    unclassified(missing)
    (body,) = re.findall(r"struct ConvertedType \{\s*enum type \{([^}]*)\}", header)
    converted = [name for name in re.findall(r"^\s*([A-Z][A-Z0-9_]+)", body, re.MULTILINE) if name != "UNDEFINED"]
    assert len([name for name in converted if name not in ("NA", "NONE")]) == len(CONVERTED_TYPES)
