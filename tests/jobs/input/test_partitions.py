"""Columns that stand in folder names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.files import read_footers, unified_schema
from lorabatch.jobs.input.partitions import with_partitions


def write(folder: Path, *names: str, **columns: list[Any]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": ["a"]} | columns), folder / name)
    return folder


def read(*urls: object, texts: tuple[str, ...] = ()) -> tuple[dict[str, dict[str, Any]], pa.Schema]:
    """File name -> its values, and the schema of all."""
    footers, _ = read_footers(list(map(str, urls)), {})
    files, schema = with_partitions(footers, unified_schema(footers), texts)
    return {file.name: file.partition for file in files}, schema


def test_folder_names_become_columns_with_the_types_that_pyarrow_gives_them(tmp_path: Path) -> None:
    write(tmp_path, "tenant=a%20b/day=3/x.parquet", "tenant=__HIVE_DEFAULT_PARTITION__/day=4/y.parquet")
    values, schema = read(tmp_path)
    assert values == {"x.parquet": {"tenant": "a b", "day": 3}, "y.parquet": {"tenant": None, "day": 4}}
    assert schema == pa.schema([("prompt", pa.string()), ("tenant", pa.string()), ("day", pa.int32())])
    own = ds.dataset(tmp_path, partitioning="hive")
    assert own.schema.equals(schema)
    assert sorted(own.to_table().column("day").to_pylist()) == [3, 4]


@pytest.mark.parametrize(
    ("values", "kind"),
    [(["1", "-2"], pa.int32()), (["1", "x"], pa.string()), (["99999999999"], pa.string()), (["1.5"], pa.string())],
)
def test_numbers_are_numbers_where_all_values_are(tmp_path: Path, values: list[str], kind: pa.DataType) -> None:
    write(tmp_path, *(f"k={value}/{value}.parquet" for value in values))
    assert read(tmp_path)[1].field("k").type == kind == ds.dataset(tmp_path, partitioning="hive").schema.field("k").type


@pytest.mark.parametrize("values", [["007", "8"], ["+1"], ["-0"], ["08", "09", "10"]])
def test_values_that_are_not_written_as_integers_are_keep_their_text(tmp_path: Path, values: list[str]) -> None:
    write(tmp_path, *(f"zip={value}/{value}.parquet" for value in values))
    found, schema = read(tmp_path)
    assert schema.field("zip").type == pa.string()
    assert found == {f"{value}.parquet": {"zip": value} for value in values}


def test_a_column_of_names_is_text_whatever_the_names_look_like(tmp_path: Path) -> None:
    write(tmp_path, "tenant=007/x.parquet", "tenant=8/y.parquet")
    values, schema = read(tmp_path, texts=("tenant",))
    assert schema.field("tenant").type == pa.string()
    assert values == {"x.parquet": {"tenant": "007"}, "y.parquet": {"tenant": "8"}}


def test_a_glob_keeps_the_folders_from_its_first_wildcard_on(tmp_path: Path) -> None:
    write(tmp_path, "run=5/tenant=a/x.parquet", "run=5/tenant=b/y.parquet")
    assert read(tmp_path / "run=5/tenant=*/*.parquet")[0] == {
        "x.parquet": {"tenant": "a"},
        "y.parquet": {"tenant": "b"},
    }
    assert read(f"{tmp_path}/**/*.parquet")[0]["x.parquet"] == {"run": 5, "tenant": "a"}
    assert read(tmp_path / "run=5/tenant=a/x.parquet")[0] == {"x.parquet": {}}
    assert read(tmp_path / "run=5/tenant=a")[0] == {"x.parquet": {}}


def test_files_outside_of_the_folders_have_null_there(tmp_path: Path) -> None:
    write(tmp_path, "tenant=a/x.parquet", "y.parquet")
    values, schema = read(tmp_path)
    assert values == {"x.parquet": {"tenant": "a"}, "y.parquet": {}}
    assert schema.field("tenant").nullable


def test_folders_of_a_bucket_become_columns(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet")
    fsspec.filesystem("memory").put(str(tmp_path / "x.parquet"), "/hive/tenant=a/x.parquet")
    assert read("memory://hive")[0] == {"x.parquet": {"tenant": "a"}}
    assert read("memory://hive/*/x.parquet")[0] == {"x.parquet": {"tenant": "a"}}


def test_a_column_in_folders_and_in_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "tenant=a/x.parquet", tenant=["b"])
    with pytest.raises(JobRequestError, match=r"'tenant': stands in folder names \(tenant=…\) and in their files too"):
        read(tmp_path)


def test_a_column_of_folder_names_may_stand_in_other_files(tmp_path: Path) -> None:
    write(tmp_path, "day=1/x.parquet")
    write(tmp_path, "y.parquet", day=[2])
    values, schema = read(tmp_path)
    assert values == {"x.parquet": {"day": 1}, "y.parquet": {}}
    assert schema.field("day").type == pa.int64()
    write(tmp_path, "day=first/z.parquet")
    with pytest.raises(JobRequestError, match=r"'day=first': column 'day' is int64 in other files"):
        read(tmp_path)


@pytest.mark.parametrize(("folder", "expected"), [("t=1/t=2", "names column 't' twice"), ("t=%FF", "not valid UTF-8")])
def test_folder_names_that_cannot_be_columns_are_refused(tmp_path: Path, folder: str, expected: str) -> None:
    write(tmp_path, f"{folder}/x.parquet")
    with pytest.raises(JobRequestError, match=expected):
        read(tmp_path)
