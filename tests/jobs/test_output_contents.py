"""What is in an output is told from its names."""

from __future__ import annotations

from lorabatch.jobs.output_contents import OutputContents, part_name

ENTRIES = {"part-00003.parquet": 10, "part-123456.parquet": 20, "_SUCCESS": 0, "_lorabatch": None}


def test_parts_records_and_success_are_ours_when_a_job_is_there() -> None:
    contents = OutputContents.of(ENTRIES, has_job=True)
    assert contents.parts == {3: 10, 123456: 20}
    assert (contents.is_finished, contents.has_records, contents.is_empty) == (True, True, False)
    assert contents.foreign_names == []
    assert {part_name(shard_id) for shard_id in contents.parts} == {name for name in ENTRIES if "part" in name}


def test_parts_without_a_job_are_another_tools() -> None:
    contents = OutputContents.of(ENTRIES, has_job=False)
    assert contents.foreign_names == ["part-00003.parquet", "part-123456.parquet", "_SUCCESS"]


def test_what_only_resembles_a_part_is_foreign_and_hidden_files_are_nobodys() -> None:
    entries = {"part-3.parquet": 1, "part-000003.parquet": 1, "part-00003.parquet.tmp": 1, ".DS_Store": 1}
    contents = OutputContents.of(entries, has_job=True)
    assert contents.parts == {}
    assert contents.foreign == ("part-000003.parquet", "part-00003.parquet.tmp", "part-3.parquet")


def test_records_of_a_job_that_was_never_frozen_leave_an_output_empty() -> None:
    assert OutputContents.of({"_lorabatch": None}, has_job=False).is_empty
    assert OutputContents.of({}, has_job=False).is_empty
