"""Tables of Python programs: what is a table, what its rows become, and when two tables are the same input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.conversion.frames import write_frame
from lorabatch.jobs.input.conversion.source import UnreadableSourceError
from lorabatch.jobs.options.values import InputTable
from lorabatch.jobs.spec import JobSpec

ROWS = [{"id": number, "prompt": f"number {number}" if number % 3 else None} for number in range(3000)]


class Dataset:
    """A data set with the two methods of the package `datasets` that are used, which the tests do not install."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def with_format(self, kind: str) -> Dataset:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pa.Table]:
        for start in range(0, self._table.num_rows, batch_size):
            yield self._table.slice(start, batch_size)


def tables() -> dict[str, Any]:
    arrow = pa.Table.from_pylist(ROWS)
    frame = pd.DataFrame(ROWS)
    return {
        "arrow": arrow,
        "batch": arrow.combine_chunks().to_batches()[0],
        "stream": arrow.to_reader(100),
        "pandas": frame,
        "polars": pl.DataFrame(ROWS),
        "duckdb": duckdb.sql("SELECT * FROM arrow"),
        "dask": dd.from_pandas(frame, npartitions=3),
        "datasets": Dataset(arrow),
        "rows": ROWS,
        "columns": arrow.to_pydict(),
    }


@pytest.mark.parametrize("kind", list(tables()))
def test_every_kind_of_table_is_an_input(kind: str, tmp_path: Path) -> None:
    table = tables()[kind]
    spec = JobSpec(model="m", output="o", input=table)
    assert isinstance(spec.input, InputTable)
    assert spec.with_absolute_paths().input is spec.input
    assert spec.inputs[0].startswith("table://")
    write_frame(spec.input.data, tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").to_pylist() == ROWS


def test_several_tables_and_urls_keep_their_order() -> None:
    table = pa.table({"prompt": ["a"]})
    spec = JobSpec(model="m", output="o", input=[table, "x.csv", [{"prompt": "b"}], Path("y.csv")])
    assert [type(url) for url in spec.inputs] == [InputTable, str, InputTable, str]
    assert spec.inputs[1::2] == ("x.csv", "y.csv")
    assert copy.copy(spec.inputs[0]).data is table
    assert pickle.loads(pickle.dumps(spec.inputs[2])).data == [{"prompt": "b"}]


@pytest.mark.parametrize(
    "wrong", [3, [3], [3, 4], ["a.csv", 3], [{"prompt": "a"}, 3], {"prompt": 3}, np.zeros(3), [], object()]
)
def test_what_is_no_table_is_refused(wrong: Any) -> None:
    with pytest.raises(JobRequestError, match="input"):
        JobSpec(model="m", output="o", input=wrong)


def digest(table: Any, folder: Path) -> str:
    (folder / "x.parquet").unlink(missing_ok=True)
    return write_frame(table, folder / "x.parquet")


def test_a_table_is_the_same_whatever_its_batches_and_buffers_are(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    before = digest(table, tmp_path)
    cut = pa.concat_tables([table.slice(0, 7), table.slice(7, 1500), table.slice(1507)])
    assert digest(cut, tmp_path) == digest(table.to_reader(33), tmp_path) == before
    # other bytes in the place of nulls
    filled = pa.array([text or "hidden" for text in table.column("prompt").to_pylist()])
    mask = pa.array([row["prompt"] is None for row in ROWS])
    hidden = pa.Table.from_pydict({"id": table.column("id"), "prompt": pa.compute.if_else(mask, None, filled)})
    assert digest(hidden, tmp_path) == before
    for changed in (
        table.slice(1),
        pa.concat_tables([table.slice(1), table.slice(0, 1)]),
        table.select(["prompt", "id"]),
        table.rename_columns(["id", "text"]),
        table.cast(pa.schema({"id": pa.int32(), "prompt": pa.string()})),
        table.set_column(1, "prompt", pa.array([row["prompt"] or "" for row in ROWS])),
    ):
        assert digest(changed, tmp_path) != before


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.none() | st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=3), max_size=3)),
    cuts=st.lists(st.integers(0, 20), max_size=3),
)
def test_the_hash_depends_on_values_only(tmp_path_factory: Any, values: list[Any], cuts: list[int]) -> None:
    folder = tmp_path_factory.getbasetemp()
    table = pa.table({"x": pa.array(values, pa.list_(pa.string()))})
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    pieces = [table.slice(start, end - start) for start, end in pairwise(edges)]
    other = pa.concat_tables(pieces) if pieces else table
    assert digest(table, folder) == digest(other, folder)


def test_rows_may_lack_fields_that_come_late(tmp_path: Path) -> None:
    write_frame([{"a": 1}, {"b": ["x"]}], tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": ["x"]}]


def test_a_named_index_is_a_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": [7, 8], "prompt": ["a", "b"]}).set_index("id")
    for table in (frame, dd.from_pandas(frame, npartitions=2)):
        digest(table, tmp_path)
        assert set(pq.read_table(tmp_path / "x.parquet").column_names) == {"id", "prompt"}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([{"a": 1}, {"a": "x"}], "column 'a': its values have no common type"),
        ({"a": [1, "x"]}, "column 'a': its values have no common type"),
        ([{1: "a"}], "column 1 is named by int, expected text"),
        (pd.DataFrame({"a": ["x", 1]}), "Conversion failed for column a with type object"),
        (
            {"train": Dataset(pa.table({})), "test": Dataset(pa.table({}))},
            r"several data sets \(train, test\). Give one",
        ),
        (dd.from_map(lambda kind: pd.DataFrame({"a": [kind]}), ["x", 1], meta={"a": "object"}), "partition 1: "),
    ],
    ids=["rows", "columns", "names", "pandas", "splits", "partitions"],
)
def test_a_table_that_cannot_be_written_is_explained(table: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableSourceError, match=expected):
        write_frame(InputTable(table).data, tmp_path / "x.parquet")


def test_row_groups_are_small_whatever_the_rows_are(tmp_path: Path) -> None:
    write_frame(pa.table({"n": range(20_000)}), tmp_path / "x.parquet")
    assert [group_rows(tmp_path / "x.parquet", group) for group in range(3)] == [8192, 8192, 3616]
    write_frame(pa.table({"p": ["x" * (20 << 20)] * 4}), tmp_path / "y.parquet")
    assert [group_rows(tmp_path / "y.parquet", group) for group in range(4)] == [1, 1, 1, 1]


def group_rows(path: Path, group: int) -> int:
    return int(pq.read_metadata(path).row_group(group).num_rows)
