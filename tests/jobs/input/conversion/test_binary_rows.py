"""Arrow and ORC files: rows and types as they are, and damage that costs a child process only."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import feather, orc

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.conversion import binary_rows

TABLE = pa.table(
    {
        "id": pa.array([1, 2, None], pa.int32()),
        "prompt": ["a", None, "c"],
        "at": pa.array([datetime(2024, 1, 31, 12, 30), None, None], pa.timestamp("ns")),
        "price": pa.array([Decimal("1.50"), None, None], pa.decimal128(10, 2)),
        "messages": [[{"role": "user", "content": "x"}], [], None],
    }
)


def written(write: Any, table: pa.Table, path: Path, **options: Any) -> bytes:
    write(table, str(path), **options)
    return path.read_bytes()


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def test_rows_of_every_kind_of_file(convert: Any, tmp_path: Path) -> None:
    for content, kind in (
        (written(feather.write_feather, TABLE, tmp_path / "x", compression="zstd"), "Arrow"),
        (stream(TABLE), "Arrow"),
        (written(orc.write_table, TABLE, tmp_path / "y"), "ORC"),
    ):
        table = convert(kind, content)
        assert table.to_pylist() == TABLE.to_pylist()
        assert [column.type for column in table.schema][:4] == [column.type for column in TABLE.schema][:4]


def test_types_that_parquet_lacks_become_those_of_their_values_or_are_named(convert: Any, tmp_path: Path) -> None:
    frame = pl.DataFrame({"v": ["a long text, so that it is a view", "b"], "c": ["x", "y"]}).cast({"c": pl.Categorical})
    frame.write_ipc(tmp_path / "x")
    table = convert("Arrow", (tmp_path / "x").read_bytes())
    assert table.column("v").to_pylist() == frame["v"].to_list()
    assert table.column("c").to_pylist() == ["x", "y"]
    runs = pa.table({"r": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), ["a", "b"])})
    assert convert("Arrow", stream(runs)).to_pydict() == {"r": ["a", "a", "b"]}
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(JobRequestError, match=r"column 'u' is sparse_union.*, which no Parquet file has"):
        convert("Arrow", stream(pa.table({"u": union})))


def test_files_that_are_cut_or_joined_are_refused(convert: Any, tmp_path: Path) -> None:
    whole = stream(TABLE)
    one = stream(TABLE.slice(0, 2))
    for content in (whole[:-8], one[:-8], whole[: len(whole) // 2], whole + whole, b""):
        with pytest.raises(JobRequestError, match="not a readable Arrow file"):
            convert("Arrow", content)
    file = written(feather.write_feather, TABLE, tmp_path / "x", compression="uncompressed")
    with pytest.raises(JobRequestError, match="not a readable Arrow file"):
        convert("Arrow", file[:-20])
    with pytest.raises(JobRequestError, match="not a readable ORC file"):
        convert("ORC", written(orc.write_table, TABLE, tmp_path / "y")[:-20])


def test_damaged_bytes_end_no_process_but_the_child(convert: Any, tmp_path: Path) -> None:
    contents = [
        ("Arrow", written(feather.write_feather, TABLE, tmp_path / "x", compression="uncompressed")),
        ("Arrow", stream(TABLE)),
        ("ORC", written(orc.write_table, TABLE, tmp_path / "y")),
    ]
    random = np.random.default_rng(7)
    for kind, content in contents:
        for _ in range(30):
            damaged = bytearray(content)
            for place in random.integers(0, len(content), 3):
                damaged[place] = random.integers(256)
            with suppress(JobRequestError):
                convert(kind, bytes(damaged))
    assert convert("Arrow", contents[1][1]).num_rows == 3


def test_few_bytes_that_stand_for_many_are_refused(
    convert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary_rows, "_MEMORY_BYTES", 128 << 20)
    bomb = pa.table({"prompt": ["x" * (200 << 20)]})
    content = written(feather.write_feather, bomb, tmp_path / "x", compression="zstd")
    assert len(content) < 1 << 20
    with pytest.raises(JobRequestError, match=r"it needs more than . GiB of memory"):
        convert("Arrow", content)


def test_rows_that_take_no_bytes_are_refused_at_once(convert: Any) -> None:
    nothing = pa.table({"prompt": pa.nulls(1 << 30)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, nothing.schema) as writer:
        writer.write_table(nothing)
    with pytest.raises(JobRequestError, match="more than 1000 rows for each of its bytes"):
        convert("Arrow", bytes(sink.getvalue()))
