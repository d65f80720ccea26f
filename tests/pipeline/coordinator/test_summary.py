"""Parts are compared with the plan before they count: what is there must be what its shard would be now."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.jobs.contents import part_name
from lorabatch.jobs.errors import JobFailedError
from lorabatch.jobs.outcome import KindOfError
from lorabatch.jobs.parts import PartMark, changed_parts, missing_parts, read_mark
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.coordinator.summary import Account, account_parts
from lorabatch.pipeline.dataset.reader import ShardReader, read_shard
from lorabatch.pipeline.dataset.writer import part_bytes

Prepare = Callable[..., Any]
Echo = Callable[..., Any]


@pytest.fixture
def job(prepare_job: Prepare, answer_by_echo: Echo) -> Any:
    """A job of three shards of four rows, all of them committed."""
    table = pa.table(
        {"id": [*range(12)], "adapter": [None, "alpha", "broken"] * 4, "prompt": [f"p{i}" for i in range(12)]}
    )
    job = prepare_job(table, rows_per_shard=4)
    for rows in job.shards():
        job.store.commit_part(rows.shard_id, part_bytes(rows, answer_by_echo(rows), job.record, "run"))
    return job


def counted(job: Any, run_id: str = "run", reopens: bool = False, **record: Any) -> Account:
    return account_parts(
        sorted(job.store.committed_parts()), job.store, job.record.model_copy(update=record), run_id, reopens
    )


def path_of(store: JobStore, shard_id: int) -> Any:
    return store.location.local_path(part_name(shard_id))


def rewritten(store: JobStore, shard_id: int, change: Callable[[pa.Table], pa.Table]) -> bytes:
    """A part as another program writes it: with the same metadata, and changed rows."""
    part, sink = pq.read_table(path_of(store, shard_id)), io.BytesIO()
    pq.write_table(change(part).replace_schema_metadata(part.schema.metadata), sink)
    return sink.getvalue()


def with_completion(table: pa.Table, text: str) -> pa.Table:
    place = table.column_names.index("completion")
    texts = [None if one is None else text for one in table["completion"].to_pylist()]
    return table.set_column(place, "completion", pa.array(texts, pa.string()))


def test_parts_of_the_plan_count(job: Any) -> None:
    account = counted(job)
    assert (account.num_rows, account.num_parts, account.unusable) == (12, 3, {})
    account.check_complete(job.plan())
    shards = ShardReader(job.store, job.record)
    sizes = job.store.committed_parts()
    assert {shard_id: num_bytes for shard_id, (num_bytes, _) in account.parts.items()} == sizes
    for shard_id, (_, contents) in account.parts.items():
        mark = read_mark(job.store, shard_id)
        assert isinstance(mark, PartMark)
        assert mark.contents == contents
        rows = read_shard(job.store, job.record, shard_id)
        assert mark.contents == rows.contents(job.record) == shards.contents(shard_id)
        assert (mark.model_sha256, mark.tokenizer_sha256) == (
            job.record.model.sha256,
            job.record.model.tokenizer_sha256,
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda store: path_of(store, 0).read_bytes(), "holds the rows of shard 0"),
        (lambda store: b"", "cannot be read"),
        (lambda store: path_of(store, 1).read_bytes()[:300], "cannot be read"),
        (lambda store: path_of(store, 1).read_bytes()[:-1], "cannot be read"),
        (lambda store: b"PAR1" + bytes(500) + b"PAR1", "cannot be read"),
        (lambda store: rewritten(store, 1, lambda t: t.slice(1)), "has other answers"),
        (lambda store: rewritten(store, 1, lambda t: t.take([1, 0, 2, 3])), "has other answers"),
        (lambda store: rewritten(store, 1, lambda t: t.take([0, 1, 2, 2])), "has other answers"),
        (lambda store: rewritten(store, 1, lambda t: with_completion(t, "other")), "has other answers"),
        (lambda store: pa_bytes(pa.table({"id": [1]})), "was written by no job"),
    ],
)  # fmt: skip
def test_what_is_not_the_part_of_its_shard_does_not_count(
    job: Any, change: Callable[[JobStore], bytes], said: str
) -> None:
    path_of(job.store, 1).write_bytes(change(job.store))
    account = counted(job)
    assert said in account.unusable.pop(1)
    assert (account.unusable, account.num_rows, sorted(account.parts)) == ({}, 8, [0, 2])
    with pytest.raises(JobFailedError, match="Run the same command again"):
        account.check_complete(job.plan())


def pa_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def test_metadata_of_others_may_be_no_text() -> None:
    mark = PartMark.of(
        pa.schema([], metadata={b"\xff": b"\xff", b"lorabatch.job_id": b"j", b"lorabatch.num_curable": b"2"})
    )
    assert (mark.job_id, mark.num_curable, mark.contents) == ("j", 2, "")


def test_a_part_that_is_gone_meanwhile_does_not_count(job: Any) -> None:
    path_of(job.store, 1).unlink()
    assert account_parts([0, 1, 2], job.store, job.record, "run").unusable == {1: "is gone"}


def test_parts_of_another_base_model_or_adapter_do_not_count(job: Any) -> None:
    mark, other = read_mark(job.store, 1), job.record.model.model_copy(update={"sha256": "f" * 64})
    assert isinstance(mark, PartMark)
    of_other = mark.problem(1, job.record.model_copy(update={"model": other}), mark.contents)
    assert of_other == f"was made with base model {mark.model_sha256[:12]}, not with ffffffffffff"
    alpha, *rest = job.record.adapters
    changed = counted(job, adapters=(alpha.model_copy(update={"sha256": "e" * 64}), *rest))
    served = counted(job, adapters=(alpha, rest[0], rest[1].model_copy(update={"verdict": "exact", "reasons": ()})))
    assert {*changed.unusable.values(), *served.unusable.values()} == {"was made of other rows or with other adapters"}
    names = job.plan().adapter_names
    assert changed.unusable.keys() == {i for i, of_shard in enumerate(names) if "alpha" in of_shard}
    assert served.unusable.keys() == {i for i, of_shard in enumerate(names) if "broken" in of_shard}


def test_errors_of_an_earlier_run_that_may_be_right_now_are_computed_again(job: Any, answer_by_echo: Echo) -> None:
    rows = read_shard(job.store, job.record, 1)
    (first, answer), *rest = answer_by_echo(rows).items()
    failed = replace(answer, completion=None, finish_reason="error", error=f"adapter 'a': gone. {RUN_AGAIN}")
    part = part_bytes(rows, {first: failed, **dict(rest)}, job.record, "run")
    path_of(job.store, 1).write_bytes(part)
    assert PartMark.of(pq.read_schema(io.BytesIO(part))).num_curable == 1
    assert counted(job, reopens=True).curable == {}, "the run that has just written it"
    assert counted(job, "next", reopens=True).curable == {1: "has 1 error rows that may be right now"}
    assert sorted(counted(job, "next").parts) == [0, 1, 2], "at the end of a run they count"


def test_a_job_that_was_done_says_which_parts_are_not_as_they_were(job: Any) -> None:
    def found(compare: Any = changed_parts) -> dict[int, str]:
        return compare(job.store, job.store.contents())  # type: ignore[no-any-return]

    assert found() == {}, "nothing is known of jobs of earlier versions"
    parts = counted(job).parts
    job.store.write_parts(parts)
    assert found() == found(missing_parts) == {}
    whole = [path_of(job.store, i).read_bytes() for i in range(3)]
    path_of(job.store, 0).unlink()
    path_of(job.store, 1).write_bytes(whole[1][:-10])
    path_of(job.store, 7).write_bytes(whole[2])
    expected = {
        0: "is not there",
        1: f"has {len(whole[1]) - 10} bytes, not {len(whole[1])}",
        7: "belongs to no shard of the job",
    }
    assert found() == found(missing_parts) == expected
    path_of(job.store, 7).unlink()
    for shard_id, content in enumerate(whole):
        path_of(job.store, shard_id).write_bytes(content)
    assert found() == {}
    # A part of the same size, which only its metadata tells apart.
    job.store.write_parts({i: (parts[i][0], parts[min(i, 1)][1]) for i in parts})
    assert found(missing_parts) == {}
    assert found() == {2: f"holds the rows of shard 2 of {job.record.job_id}"}


def test_rows_with_an_empty_name_and_without_one_are_counted_together(
    prepare_job: Prepare, answer_by_echo: Echo
) -> None:
    table = pa.table({"id": range(4), "adapter": ["", None, "alpha", ""], "prompt": ["p"] * 4})
    job = prepare_job(table)
    for rows in job.shards():
        job.store.commit_part(rows.shard_id, part_bytes(rows, answer_by_echo(rows), job.record, "run"))
    account = counted(job)
    assert [(count.adapter, count.num_rows) for count in account.adapter_outcomes()] == [("", 3), ("alpha", 1)]
    assert {name for name, _ in account.answer_lengths()} == {None, "alpha"}


@pytest.mark.parametrize(
    "column",
    [
        {"regex": ["a+", None, "b+", None]},
        {"choice": [["a", "b"], None, ["c"], None]},
        {"stop": [["x"], None, ["y", "z"], None]},
    ],
    ids=lambda column: next(iter(column)),
)
def test_lengths_are_counted_by_the_constraints_and_stops_of_rows(
    prepare_job: Prepare, answer_by_echo: Echo, column: dict[str, Any]
) -> None:
    table = pa.table({"id": range(4), "adapter": ["alpha"] * 4, "prompt": ["p"] * 4} | column)
    job = prepare_job(table, row_settings="all")
    for rows in job.shards():
        job.store.commit_part(rows.shard_id, part_bytes(rows, answer_by_echo(rows), job.record, "run"))
    lengths = counted(job).answer_lengths()
    assert sorted(found.num_rows for found in lengths.values()) == [1, 1, 2]


def test_an_index_that_is_gone_costs_seconds_and_tasks_and_no_count(job: Any) -> None:
    whole = counted(job)
    assert whole.has_numbers
    for path in Path(job.store.location.local_path("_lorabatch/index")).iterdir():
        path.unlink()
    account = counted(job)
    assert not account.has_numbers
    assert (account.num_rows, account.num_errors) == (whole.num_rows, whole.num_errors) == (12, 4)
    assert [count.engine_s for count in account.adapter_outcomes()] == [None, None, None]
    planned = (KindOfError("adapter", 4, "in:2", "adapter='broken': refused."),)
    assert account.error_kinds(planned) == planned


def test_an_index_of_an_earlier_version_has_one_task(job: Any) -> None:
    for path in Path(job.store.location.local_path("_lorabatch/index")).iterdir():
        with pa.ipc.open_file(path) as reader:
            table = reader.read_all()
        with pa.ipc.new_file(path, table.schema.remove(table.schema.get_field_index("task"))) as writer:
            writer.write_table(table.drop_columns("task"))
    account = counted(job)
    assert account.has_numbers
    assert {task for _, task in account.answer_lengths()} == {0}
