"""A job's folder: committed means there, finished means said last, and nothing that is not ours is touched.

The contents of an output follow from its names.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorabatch.jobs.contents import OutputContents, part_name
from lorabatch.jobs.errors import DamagedRecordError, MissingFileError, OutputConflictError, StorageError
from lorabatch.jobs.record import JobRecord, JobState, WorkerState
from lorabatch.jobs.store import JobStore

Place = tuple[str, dict[str, Any]]
Record = Callable[..., JobRecord]


@pytest.fixture
def store(place: Place) -> JobStore:
    return JobStore(*place)


def fill(store: JobStore, record: JobRecord) -> None:
    """Everything a job writes."""
    store.freeze(record)
    store.write_rows(0, b"rows")
    store.write_index(0, b"index")
    store.write_plan(b"plan")
    store.write_plan_facts({"shards": []})
    store.append_wip(1, "0-abc", b"wip")
    store.write_state(JobState("running", 1.0))
    store.append_events(b"{}\n")
    store.append_log("client", "hello\n")
    store.commit_part(0, b"part")
    store.write_summary({"rows": 1})
    store.mark_success()


def test_a_part_is_committed_once_and_says_who_did_it(store: JobStore) -> None:
    assert not store.is_committed(3)
    assert store.commit_part(3, b"first")
    assert not store.commit_part(3, memoryview(b"second"))
    assert store.is_committed(3)
    with store.open_part(3) as part:
        assert part.read() == b"first"
    store.commit_part(100_000, b"x")
    assert store.committed_parts() == {3: 5, 100_000: 1}


def test_unfinished_work_is_kept_per_attempt_until_the_part_is_there(store: JobStore) -> None:
    store.append_wip(1, "0-aa", b"one ")
    store.append_wip(1, "0-aa", b"two")
    store.append_wip(1, "1-bb", b"three")
    store.append_wip(11, "0-cc", b"other shard")
    assert store.read_wip(1) == {"0-aa": b"one two", "1-bb": b"three"}
    assert store.read_wip(2) == {}
    store.commit_part(1, b"part")
    assert store.read_wip(1) == {}
    assert store.read_wip(11) == {"0-cc": b"other shard"}


def test_the_first_job_to_freeze_has_the_output(store: JobStore, record: Record) -> None:
    with pytest.raises(MissingFileError):
        store.read_record()
    assert store.contents().is_empty
    assert store.freeze(record(job_id="first"))
    assert not store.freeze(record(job_id="second"))
    assert store.read_record() == record(job_id="first")
    assert not store.contents().is_empty
    store.replace_record(record(job_id="changed"))
    assert store.read_record().job_id == "changed"


def test_a_record_that_is_replaced_is_read_anew(store: JobStore, record: Record) -> None:
    store.freeze(record())
    first = store.read_record()
    assert store.read_record() is first
    other = JobStore(store.url, store.location.storage_options)
    other.replace_record(record(created_at="2031-01-01T00:00:00+00:00"))
    assert store.read_record().created_at == "2031-01-01T00:00:00+00:00"
    other.replace_record(record())
    assert store.read_record() == first
    assert pickle.loads(pickle.dumps(store)).read_record() == first
    assert len(pickle.dumps(store)) == len(pickle.dumps(other))


def test_success_is_seen_and_cleaning_up_keeps_what_a_finished_job_shows(store: JobStore, record: Record) -> None:
    fill(store, record())
    assert store.is_finished()
    store.clean_up()
    contents = store.contents()
    assert (contents.has_job, contents.is_finished, contents.parts, contents.foreign) == (True, True, {0: 4}, ())
    assert not store.has_index(0)
    assert store.has_plan()
    assert store.read_wip(1) == {}
    assert store.read_summary() == {"rows": 1}
    assert store.read_events() == [{}]
    assert store.read_logs() == {"client": "hello\n"}


def test_overwriting_leaves_nothing(store: JobStore, record: Record) -> None:
    fill(store, record())
    store.overwrite()
    assert store.contents().is_empty
    assert set(store.location.list()) <= {"_lorabatch"}
    assert store.freeze(record())


def test_overwriting_touches_nothing_when_strangers_files_are_there(store: JobStore, record: Record) -> None:
    fill(store, record())
    store.location.write("report.csv", b"mine")
    store.location.write("part-x.parquet", b"mine")
    with pytest.raises(OutputConflictError, match=r"2 files that are not this job's \(part-x\.parquet, report\.csv\)"):
        store.overwrite()
    assert store.is_finished()
    assert store.committed_parts() == {0: 4}


def test_parts_of_another_tool_are_not_taken_for_ours(store: JobStore) -> None:
    store.location.write("part-00000.parquet", b"spark")
    store.location.write("_SUCCESS", b"")
    with pytest.raises(OutputConflictError, match=r"part-00000\.parquet, _SUCCESS"):
        store.overwrite()
    assert set(store.location.list()) - {"_lorabatch"} == {"part-00000.parquet", "_SUCCESS"}


def test_a_removal_that_was_killed_can_be_repeated(
    store: JobStore, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, record())
    remove, calls = type(store.location).remove, []

    def killed(location: Any, names: Any) -> None:
        calls.append(names)
        if len(calls) == 3:
            raise KeyboardInterrupt
        remove(location, names)

    with monkeypatch.context() as patch:
        patch.setattr(type(store.location), "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            store.overwrite()
    assert store.contents().has_job
    store.overwrite()
    assert store.contents().is_empty


def test_uncommitting_takes_the_success_mark_with_it(store: JobStore) -> None:
    store.commit_part(0, b"x")
    store.mark_success()
    store.remove_part(0)
    assert not store.is_finished()
    assert store.committed_parts() == {}


def test_a_chunk_counts_as_indexed_when_numbers_and_rows_are_there(store: JobStore) -> None:
    store.write_index(0, b"i")
    assert not store.has_index(0)
    store.write_rows(0, b"r")
    assert store.has_index(0)


def test_the_first_plan_stays_and_what_is_known_of_it_may_change(store: JobStore) -> None:
    assert store.write_plan(b"plan")
    assert not store.has_plan_facts()
    assert not store.write_plan(b"another")
    source = store.plan_source()
    assert (source.read_bytes() if isinstance(source, Path) else source.read()) == b"plan"
    for facts in ({"a": 1}, {"a": 2}):
        store.write_plan_facts(facts)
        assert store.read_plan_facts() == facts


def test_arrow_files_come_as_paths_where_they_can_be_mapped(store: JobStore) -> None:
    store.write_rows(5, b"rows")
    store.write_index(5, b"index")
    store.write_plan(b"plan")
    store.write_plan_facts({"a": 1})
    for source, expected in (
        (store.rows_source(5), b"rows"),
        (store.index_source(5), b"index"),
        (store.plan_source(), b"plan"),
    ):
        assert isinstance(source, Path) == store.location.is_local
        assert (source.read_bytes() if isinstance(source, Path) else source.read()) == expected
    assert store.read_plan_facts() == {"a": 1}
    with pytest.raises(MissingFileError, match="chunk-00007"):
        store.rows_source(7)


def test_state_events_and_logs_are_read_while_the_job_writes(store: JobStore) -> None:
    assert store.read_state() is None
    state = JobState("running", 5.0, rows=7, workers=(WorkerState("w", 2.5, resident_adapters=("a",)),))
    store.write_state(JobState("indexing", 4.0))
    store.write_state(state)
    assert store.read_state() == state
    store.append_events(b'{"n": 1}\n{"n": 2}\n')
    store.append_events(b'{"n": 3}\n{"n"')
    assert store.read_events() == [{"n": 1}, {"n": 2}, {"n": 3}]
    store.append_events(b'\n{"n": 4}\n"n"\n\n\xff\n{"n": 5}\n')
    assert store.read_events() == [{"n": n} for n in (1, 2, 3, 4, 5)]
    store.append_log("worker-1", "é\n")
    store.append_log("client", "a\n")
    store.append_log("client", "b\n")
    assert store.read_logs() == {"client": "a\nb\n", "worker-1": "é\n"}


def test_cancelling_is_asked_and_forgotten(store: JobStore) -> None:
    assert not store.is_cancel_requested()
    store.request_cancel()
    store.request_cancel()
    assert store.is_cancel_requested()
    store.clear_cancel()
    store.clear_cancel()
    assert not store.is_cancel_requested()


def test_a_damaged_record_says_what_to_do(store: JobStore, record: Record) -> None:
    store.location.write("_lorabatch/job.json", b"{")
    with pytest.raises(DamagedRecordError, match=r"job\.json: cannot be read back"):
        store.read_record()
    store.location.write("_lorabatch/job.json", record().to_json().replace(b'"format": 1', b'"format": 99'))
    with pytest.raises(DamagedRecordError, match="format=99"):
        store.read_record()
    store.location.write("_lorabatch/plan.json", b"[]")
    with pytest.raises(DamagedRecordError, match="expected a JSON object, found list"):
        store.read_plan_facts()
    store.location.write("_lorabatch/state.json", b"[]")
    with pytest.raises(DamagedRecordError, match=r"state\.json"):
        store.read_state()
    store.location.write("_lorabatch/state.json", b'{"phase": "running", "updated_at_s": 1e999}')
    with pytest.raises(DamagedRecordError, match=r"state\.json"):
        store.read_state()
    for name in ("job", "plan"):
        store.location.write(f"_lorabatch/{name}.json", b'{"x": ' + b"[" * 100_000)
        with pytest.raises(DamagedRecordError, match="it nests too deeply"):
            store.read_record() if name == "job" else store.read_plan_facts()


def test_a_store_travels_to_workers_and_shows_no_secret(store: JobStore) -> None:
    store.commit_part(0, b"x")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.committed_parts() == {0: 1}
    assert "very-secret" not in repr(copy)


def test_an_unreachable_store_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError):
        JobStore(str(tmp_path / "file")).commit_part(0, b"x")


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


def test_what_only_resembles_a_part_is_foreign_and_hidden_files_are_ignored() -> None:
    entries = {"part-3.parquet": 1, "part-000003.parquet": 1, "part-00003.parquet.tmp": 1, ".DS_Store": 1}
    contents = OutputContents.of(entries, has_job=True)
    assert contents.parts == {}
    assert contents.foreign == ("part-000003.parquet", "part-00003.parquet.tmp", "part-3.parquet")


def test_records_of_a_job_that_was_never_frozen_leave_an_output_empty() -> None:
    assert OutputContents.of({"_lorabatch": None}, has_job=False).is_empty
    assert OutputContents.of({}, has_job=False).is_empty
