"""Batch files become one Parquet file: every line is a row, in bounded memory, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.jobs.input.columns import find_roles
from lorabatch.jobs.openai_batch import importing
from lorabatch.jobs.openai_batch.importing import ImportedBatch, import_batch
from lorabatch.jobs.storage.location import Location

from .batch_lines import chat, completion

Place = tuple[str, dict[str, Any]]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "rows.parquet"


def write(path: Path, *requests: Any, end: bytes = b"\n") -> str:
    lines = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in requests)
    path.write_bytes(b"".join(line + end for line in lines))
    return str(path)


def imported(path: Path, *requests: Any, base: tuple[str, ...] = ("base",), end: bytes = b"\n") -> ImportedBatch:
    return import_batch([write(path / "batch.jsonl", *requests, end=end)], str(path / "rows.parquet"), base, {})


def rows(target: Path) -> list[dict[str, Any]]:
    table = pq.read_table(target)
    assert find_roles(table.schema, {}, row_settings=["all"])[1] == []
    return list(table.to_pylist())


def named(name: str, **body: Any) -> dict[str, Any]:
    return chat(**body) | {"custom_id": name}


def test_each_line_is_a_row_with_the_columns_that_rows_use(tmp_path: Path, target: Path) -> None:
    found = imported(tmp_path, named("a", model="base", max_tokens=3), named("b", stop="x"), named("c"))
    messages = json.dumps(chat()["body"]["messages"])
    common = {"messages": messages, "temperature": 1.0}
    assert rows(target) == [
        {"id": "a", "adapter": None, "openai_model": "base", **common, "max_tokens": 3, "stop": None},
        {"id": "b", "adapter": "tenant", "openai_model": "tenant", **common, "max_tokens": None, "stop": ["x"]},
        {"id": "c", "adapter": "tenant", "openai_model": "tenant", **common, "max_tokens": None, "stop": None},
    ]
    assert found.to_text().splitlines() == [
        f"{target}: 3 requests",
        "  1 request of model 'base', the base model",
        "  2 requests of model 'tenant', an adapter",
        "Without max_tokens: 2. The job's --max-tokens holds (128).",
    ]


def test_a_line_that_is_no_request_is_a_row_with_the_reason_and_no_prompt(tmp_path: Path, target: Path) -> None:
    found = imported(tmp_path, named("a"), b"oops", named("b", audio={}), named("a"), named(""))
    bad = [row for row in rows(target) if row["openai_error"]]
    assert [(row["id"], row["openai_error"]) for row in bad] == [
        ("batch.jsonl:2", "batch.jsonl:2: The line is no JSON object: Expecting value: line 1 column 1 (char 0)."),
        ("b", "batch.jsonl:3: audio={}: not supported. Leave it out."),
        ("batch.jsonl:4", "batch.jsonl:4: custom_id='a': batch.jsonl:1 has it already."),
        ("batch.jsonl:5", "batch.jsonl:5: custom_id='': expected text."),
    ]
    assert all(row["messages"] is row["adapter"] is row["openai_model"] is None for row in bad)
    assert (found.num_requests, found.num_refused) == (1, 4)
    assert [line.strip() for line in found.to_text().splitlines()[-4:]] == [row["openai_error"] for row in bad]


def test_made_up_ids_give_way_to_those_of_requests(tmp_path: Path, target: Path) -> None:
    imported(tmp_path, named("batch.jsonl:2"), b"oops", b"oops", named("batch.jsonl:3"))
    found = [(row["id"], row["openai_error"] is None) for row in rows(target)]
    assert found == [
        ("batch.jsonl:2", True),
        ("batch.jsonl:2'", False),
        ("batch.jsonl:3", False),
        ("batch.jsonl:4", False),
    ]


def test_several_files_are_one_input_in_which_ids_are_unique(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x").mkdir()
    urls = [write(tmp_path / "b.jsonl", named("1"), b"?"), write(tmp_path / "x" / "b.jsonl", named("1"), b"?")]
    import_batch(urls, str(target), [], {})
    assert [row["id"] for row in rows(target)] == ["1", "b.jsonl:2", "b.jsonl:1", "b.jsonl:2'"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n", b"\n  \r\n"])
def test_line_ends_empty_lines_and_byte_order_marks_do_not_matter(tmp_path: Path, target: Path, end: bytes) -> None:
    first = b"\xef\xbb\xbf" + json.dumps(named("a")).encode()
    imported(tmp_path, first, named("b"), end=end)
    assert [row["id"] for row in rows(target)] == ["a", "b"]
    content = (tmp_path / "batch.jsonl").read_bytes().rstrip()
    (tmp_path / "batch.jsonl").write_bytes(content)
    import_batch([str(tmp_path / "batch.jsonl")], str(target), [], {})
    assert [row["id"] for row in rows(target)] == ["a", "b"]


def test_completions_have_a_prompt_of_text_or_of_tokens(tmp_path: Path, target: Path) -> None:
    imported(tmp_path, completion(prompt="one"))
    assert rows(target)[0] | {"prompt": "one", "max_tokens": 16, "temperature": 1.0} == rows(target)[0]
    imported(tmp_path, completion(prompt=[3, 4]))
    assert rows(target)[0]["prompt_token_ids"] == [3, 4]
    assert "prompt" not in rows(target)[0]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (completion(), "messages (/v1/chat/completions) at batch.jsonl:2, and text (/v1/completions) at batch.jsonl:3"),
        (completion(prompt=[1]), "at batch.jsonl:2, and token ids (/v1/completions) at batch.jsonl:3"),
    ],
)
def test_kinds_of_prompts_are_not_mixed(tmp_path: Path, target: Path, second: dict[str, Any], words: str) -> None:
    with pytest.raises(JobRequestError) as caught:
        imported(tmp_path, b"oops", chat(), second | {"custom_id": "b"})
    assert words in str(caught.value)
    assert not target.exists()


def test_a_file_without_lines_is_an_input_without_rows(tmp_path: Path, target: Path) -> None:
    assert imported(tmp_path).num_requests == 0
    assert pq.read_schema(target).names == ["id", "adapter", "openai_model", "messages"]
    assert rows(target) == []


def test_a_file_without_any_request_is_refused(tmp_path: Path, target: Path) -> None:
    target.write_bytes(b"old")
    with pytest.raises(JobRequestError, match="none of 2 lines is a request") as caught:
        imported(tmp_path, b"id,prompt", b"1,hello")
    assert len(caught.value.problems) == 3
    assert target.read_bytes() == b"old"


def test_wrong_names_are_all_refused_at_once(tmp_path: Path) -> None:
    there = write(tmp_path / "a.jsonl", chat())
    with pytest.raises(JobRequestError) as caught:
        import_batch([str(tmp_path / "b.jsonl"), str(tmp_path)], there, [], {})
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == [
        "expected a name that ends with .parquet, after the batch files.",
        "no such file. Name a JSONL file.",
        "no such file. Name a JSONL file.",
    ]
    assert json.loads(Path(there).read_text()) == chat()


def test_files_are_read_and_written_in_any_store(place: Place) -> None:
    url, options = place
    Location(url, options).write("in/batch.jsonl", json.dumps(chat()).encode())
    import_batch([f"{url}/in/batch.jsonl"], f"{url}/rows.parquet", [], options)
    with Location(url, options).open("rows.parquet") as file:
        assert pq.read_table(file).column("id").to_pylist() == ["a"]
    assert Location(url, options).list() == {"in": None, "rows.parquet": Location(url, options).list()["rows.parquet"]}


def test_an_import_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(tmp_path, named("old"))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "_copy", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        imported(tmp_path, named("new"))
    assert [row["id"] for row in rows(target)] == ["old"]
    assert {path.name for path in tmp_path.iterdir()} == {"batch.jsonl", "rows.parquet"}


def test_a_full_disk_for_temporary_files_is_said(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "batch.jsonl").write_bytes(json.dumps(chat()).encode())
    monkeypatch.setattr(importing.tempfile, "TemporaryFile", partial(open, "/dev/full", "r+b", buffering=0))
    with pytest.raises(StorageError, match="cannot write a temporary file: the disk is full"):
        import_batch([str(tmp_path / "batch.jsonl")], str(target), [], {})
    assert not target.exists()


def test_many_rows_are_several_row_groups(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_GROUP_ROWS", 4)
    imported(tmp_path, *(named(str(i), seed=i if i == 9 else None) for i in range(10)))
    file = pq.ParquetFile(target)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 2]
    assert [row["seed"] for row in rows(target)] == [None] * 9 + [9]


@given(st.lists(st.sampled_from([b"?", *(json.dumps(named(name)).encode() for name in "abc")]), max_size=8))
def test_every_line_is_one_row_in_order_with_an_id_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("batch")
    if lines and set(lines) == {b"?"}:
        lines = [*lines, json.dumps(named("a")).encode()]
    found = imported(path, *lines)
    ids = [row["id"] for row in rows(path / "rows.parquet")]
    assert len(set(ids)) == len(lines) == found.num_requests + found.num_refused
    assert {row_id for row_id in ids if len(row_id) == 1} == {json.loads(x)["custom_id"] for x in lines if x != b"?"}


CODE = """
import resource, sys
from lorabatch.jobs.openai_batch.importing import import_batch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = import_batch([sys.argv[1]], sys.argv[2], [], {})
print(found.num_requests, found.num_refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.long
def test_a_line_without_end_takes_no_memory(tmp_path: Path, target: Path) -> None:
    """The file is sparse: a gigabyte of zeros in one line, and a request behind it."""
    path = tmp_path / "batch.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(named("a")).encode() + b"\n")
        file.seek(1 << 30, 1)
        file.write(b"\n" + json.dumps(named("b")).encode())
    done = subprocess.run([sys.executable, "-c", CODE, path, target], capture_output=True, text=True, check=True)
    num_requests, num_refused, grown_mb = map(int, done.stdout.split())
    assert (num_requests, num_refused) == (2, 1)
    assert grown_mb < 300
    assert [row["id"] for row in rows(target)] == ["a", "batch.jsonl:2", "b"]
    assert pa.types.is_string(pq.read_schema(target).field("openai_error").type)
