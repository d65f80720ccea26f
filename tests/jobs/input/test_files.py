"""Which files are the input, and what is wrong with those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.file_version import has_changed
from lorabatch.jobs.input.files import pack_schema, read_footers, unified_schema, unpack_schema
from lorabatch.jobs.input.finding import would_read

TABLE = pa.table({"prompt": ["a", "b", "c"]})


def write(path: Path, table: pa.Table = TABLE, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def names(url: Any) -> list[str]:
    return [footer.file.name for footer in read_footers([str(url)], {})[0]]


def test_a_file_a_folder_and_a_glob_are_inputs(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "deep/c.PARQUET", "deep/er/d.pq"):
        write(tmp_path / name)
    assert names(tmp_path / "b.parquet") == ["b.parquet"]
    assert names(tmp_path) == ["a.parquet", "b.parquet", "c.PARQUET", "d.pq"]
    assert names(f"{tmp_path}/") == names(tmp_path)
    assert names(tmp_path / "*.parquet") == ["a.parquet", "b.parquet"]
    assert names(tmp_path / "deep/**") == ["c.PARQUET", "d.pq"]


def test_a_file_is_taken_whatever_its_ending(tmp_path: Path) -> None:
    assert names(write(tmp_path / "rows.data")) == ["rows.data"]


def test_brackets_in_a_real_path_are_not_a_glob(tmp_path: Path) -> None:
    assert names(write(tmp_path / "run[1]" / "x.parquet").parent) == ["x.parquet"]


def test_hidden_files_and_our_own_output_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "part-00000.parquet")
    for name in ("_lorabatch/rows/x.parquet", ".tmp/y.parquet", "_z.parquet", ".w.parquet"):
        write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no Parquet")
    assert names(tmp_path) == ["part-00000.parquet"]


def test_files_of_equal_names_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    for folder in ("x/one", "x/two"):
        write(tmp_path / folder / "part-0.parquet")
    assert names(tmp_path) == ["one/part-0.parquet", "two/part-0.parquet"]


def test_row_groups_sizes_and_footers_are_recorded(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", row_group_size=2)
    (footer,) = read_footers([str(path)], {})[0]
    assert footer.file.row_group_rows == (2, 1)
    assert footer.file.size_bytes == path.stat().st_size
    assert footer.schema.equals(TABLE.schema)
    before = footer.file.footer_sha256
    write(path, pa.table({"prompt": ["a", "b", "d"]}), row_group_size=2)
    (changed,) = read_footers([str(path)], {})[0]
    assert changed.file.footer_sha256 != before


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes are too few"),
        (b"id,prompt\n1,hello\n2,world\n", "it does not end as Parquet files do"),
        (b"PAR1" + b"x" * 20 + b"\xff\xff\xff\x7fPAR1", "is larger than the file"),
        (b"PAR1" + b"x" * 20 + b"\x08\x00\x00\x00PAR1", "not a readable Parquet file"),
        (b"PAR1" + b"x" * 20 + b"\x08\x00\x00\x00PARE", "encrypted"),
    ],
)
def test_every_file_that_is_no_parquet_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    write(tmp_path / "good.parquet")
    for name in ("bad-1.parquet", "bad-2.parquet"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JobRequestError) as caught:
        read_footers([str(tmp_path)], {})
    assert len(caught.value.problems) == 2
    for name, problem in zip(("bad-1.parquet", "bad-2.parquet"), caught.value.problems, strict=True):
        assert f"input file {name!r}" in problem
        assert expected in problem


def test_a_thousand_bad_files_do_not_fill_the_screen(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.parquet").write_bytes(b"no")
    with pytest.raises(JobRequestError, match="20 more files cannot be read"):
        read_footers([str(tmp_path)], {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing", "not found"),
        ("missing/*.parquet", "no Parquet files there"),
        ("empty", "no Parquet files there"),
        ("zzz://bucket/x", "Protocol not known: zzz"),
    ],
)
def test_an_input_that_is_not_there_is_explained(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    url = name if "://" in name else str(tmp_path / name)
    with pytest.raises(JobRequestError, match="input=") as caught:
        read_footers([url], {})
    assert expected in str(caught.value)


def test_several_inputs_are_read_in_their_order_under_names_that_differ(tmp_path: Path) -> None:
    for name in ("one/x.parquet", "two/x.parquet", "two/y.parquet"):
        write(tmp_path / name)
    found = read_footers([str(tmp_path / "two"), str(tmp_path / "one/x.parquet")], {})[0]
    assert [footer.file.name for footer in found] == ["two/x.parquet", "two/y.parquet", "one/x.parquet"]
    fsspec.filesystem("memory").put(str(tmp_path / "one/x.parquet"), f"{tmp_path}/one/x.parquet")
    urls = [str(tmp_path / "one"), f"memory:/{tmp_path}/one"]
    distinct = {footer.file.name for footer in read_footers(urls, {})[0]}
    assert len(distinct) == 2


def test_a_file_behind_two_inputs_is_refused_rather_than_answered_twice(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (tmp_path / "a.parquet", tmp_path / "a.*", tmp_path / "link" / "a.parquet"):
        with pytest.raises(JobRequestError, match=r"a\.parquet' is behind two of the inputs"):
            read_footers([str(tmp_path), str(other)], {})


def test_problems_of_all_inputs_are_listed_together(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(JobRequestError) as caught:
        read_footers([str(tmp_path / "none"), str(tmp_path), str(tmp_path / "*.pq")], {})
    expected = ("none': not found", "*.pq': no Parquet files there", "'bad.parquet': not a readable")
    assert len(caught.value.problems) == 3
    for part, problem in zip(expected, caught.value.problems, strict=True):
        assert part in problem


@pytest.mark.parametrize(
    ("name", "kind"),
    [("rows.csv", "CSV"), ("rows.JSONL", "JSON Lines"), ("rows.ndjson.gz", "JSON Lines"), ("rows.tsv", "TSV")],
)
def test_other_formats_are_converted_whether_a_file_or_its_folder_is_named(
    tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / "rows" / name).parent.mkdir()
    (tmp_path / "rows" / name).write_text("as it is\n")
    made = write(tmp_path / "made.parquet")
    asked: list[Any] = []

    def convert(items: Any) -> list[str]:
        asked.extend(items)
        return [str(made)]

    for url in (tmp_path / "rows" / name, tmp_path / "rows", tmp_path / "rows" / "*"):
        (footer,) = read_footers([str(url)], {}, convert)[0]
        assert (footer.file.name, footer.file.url, footer.schema) == (name, str(made), TABLE.schema)
    assert {(source.name, source.kind) for source in asked} == {(name, kind)}
    assert len(asked) == 3


@pytest.mark.parametrize(("name", "kind"), [("rows.avro", "Avro"), ("rows.xlsx", "Excel")])
def test_formats_that_are_not_read_are_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("as it is\n")
    with pytest.raises(JobRequestError, match=f"'{name}': {kind}, which is not read. Write it as Parquet"):
        read_footers([str(tmp_path / name)], {})


def test_data_beside_parquet_files_that_is_not_read_is_known(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    for name in ("b.csv", "deep/c.jsonl.gz", "_hidden.csv", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert read_footers([str(tmp_path)], {})[1] == ("b.csv", "c.jsonl.gz", "notes.txt")


def test_files_in_a_bucket_are_found_and_read(s3_options: dict[str, Any], tmp_path: Path) -> None:
    fs = fsspec.filesystem("s3", **s3_options)
    fs.mkdir("input-bucket")
    fs.put(str(write(tmp_path / "x.parquet")), "input-bucket/data/x.parquet")
    (footer,) = read_footers(["s3://input-bucket/data"], s3_options)[0]
    assert (footer.file.url, footer.file.name) == ("s3://input-bucket/data/x.parquet", "x.parquet")
    with pytest.raises(JobRequestError, match="not found"):
        read_footers(["s3://no-such-bucket-here/data"], s3_options)


def test_a_bucket_that_this_process_has_listed_before_is_listed_again(
    s3_options: dict[str, Any], tmp_path: Path
) -> None:
    # As another process writes: this one's listings know nothing of it.
    other = fsspec.filesystem("s3", **s3_options, skip_instance_cache=True)
    other.mkdir("listed-bucket")
    other.put(str(write(tmp_path / "x.parquet")), "listed-bucket/data/x.parquet")
    (first,) = read_footers(["s3://listed-bucket/data"], s3_options)[0]
    fs = fsspec.filesystem("s3", **s3_options)
    assert first.file.version is not None
    assert not has_changed(fs, "listed-bucket/data/x.parquet", first.file.version)
    longer = str(write(tmp_path / "x.parquet", pa.concat_tables([TABLE, TABLE])))
    for name in ("x", "y"):
        other.put(longer, f"listed-bucket/data/{name}.parquet")
    assert has_changed(fs, "listed-bucket/data/x.parquet", first.file.version)
    again = read_footers(["s3://listed-bucket/data"], s3_options)[0]
    assert [sum(footer.file.row_group_rows) for footer in again] == [2 * TABLE.num_rows] * 2


def test_one_schema_holds_the_columns_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "late": pa.nulls(1)}))
    required = pa.schema([pa.field("prompt", pa.string()), pa.field("n", pa.int8(), nullable=False)])
    write(tmp_path / "b.parquet", pa.table({"prompt": ["x"], "n": pa.array([1], pa.int8())}, schema=required))
    write(tmp_path / "c.parquet", pa.table({"late": ["y"], "prompt": ["x"]}))
    schema = unified_schema(read_footers([str(tmp_path)], {})[0])
    assert schema == pa.schema(
        [pa.field("prompt", pa.string()), pa.field("late", pa.string()), pa.field("n", pa.int8())]
    )
    assert unpack_schema(pack_schema(schema)).equals(schema)


def test_the_work_for_one_schema_grows_with_the_columns_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({f"c{i}": [i] for i in range(500)})
    for name in ("a", "b"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    footers = read_footers([str(tmp_path)], {})[0]
    unify, num_fields = pa.unify_schemas, 0

    def counted(schemas: list[pa.Schema], **options: Any) -> pa.Schema:
        nonlocal num_fields
        num_fields += sum(map(len, schemas))
        return unify(schemas, **options)

    monkeypatch.setattr(pa, "unify_schemas", counted)
    assert unified_schema(footers).names == table.schema.names
    assert 0 < num_fields <= 4 * 500


def test_files_that_disagree_on_a_type_are_named_with_both_types(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "n": [1]}))
    write(tmp_path / "b.parquet", pa.table({"prompt": ["x"], "n": ["1"]}))
    with pytest.raises(JobRequestError, match=r"'b\.parquet': column 'n' is string, but int64 in 'a\.parquet'"):
        unified_schema(read_footers([str(tmp_path)], {})[0])


def nested(depth: int) -> bytes:
    """A file without rows and with one column, in so many structs: its footer in Thrift's compact protocol."""
    group = b"\x35\x02\x18\x01a\x15\x02\x00"  # optional, named "a", with one child
    leaf = b"\x15\x0c\x25\x02\x18\x01v\x00"  # a BYTE_ARRAY, optional, named "v"
    count, size = depth + 1, b""
    while count > 127:
        size, count = size + bytes([count & 127 | 128]), count >> 7
    schema = b"\x19\xfc" + size + bytes([count]) + group * depth + leaf
    footer = b"\x15\x02" + schema + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_a_schema_that_nests_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(nested(50))
    (footer,) = read_footers([str(path)], {})[0]
    assert footer.schema.names == ["a"]
    path.write_bytes(nested(depth))
    with pytest.raises(JobRequestError, match=r"'x\.parquet': not a readable Parquet file \(Parquet schema too deeply"):
        read_footers([str(path)], {})


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    doubled = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    write(tmp_path / "a.parquet", doubled)
    with pytest.raises(JobRequestError, match="several columns named 'prompt'"):
        unified_schema(read_footers([str(tmp_path)], {})[0])


@pytest.mark.parametrize(
    ("url", "is_read"),
    [
        ("/data", True),
        ("/data/answers/", True),
        ("/data/ans", False),
        ("/data/in.parquet", False),
        ("/data/*.parquet", False),
        ("/data/**/*.parquet", True),
        ("file:///data/*/part-*.parquet", True),
        ("s3://bucket/data", False),
    ],
)
def test_a_file_below_a_folder_or_matched_by_a_glob_would_be_read(url: str, is_read: bool) -> None:
    assert would_read(url, "/data/answers/part-00000.parquet") == is_read


def test_links_lead_to_the_same_place_and_hidden_names_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert would_read(str(tmp_path / "data"), str(tmp_path / "link" / "answers" / "part-00000.parquet"))
    assert not would_read("/data", "/data/_answers/part-00000.parquet")
    assert not would_read("s3://b/rows/", "s3://b/rows/.tmp/part-00000.parquet")
