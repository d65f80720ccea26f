"""`--update`: a job over a table that has changed keeps the answers of its unchanged rows, and computes the others.

`tests/pipeline/test_updated_jobs.py` has random edits and deaths.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_job import ECHO_FOLDER, EchoJob, Watcher, make_rows, processes_of, wait_until

import lorabatch
from lorabatch.jobs.errors import InputRowsError, JobInterruptedError, JobRequestError, OutputConflictError
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.record import JobState
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import read_status
from lorabatch.jobs.updates import computes_rows

Rows = list[dict[str, Any]]


def counts(job: EchoJob) -> dict[str, int]:
    """The counts of the latest update, without those that are 0."""
    found = job.store.read_plan_facts()["update"]
    return {name: count for name, count in found.items() if count and name != "reasons"}


def assert_like_a_fresh_job(client: Any, job: EchoJob, **options: Any) -> None:
    """The output has what a job over the same table has that keeps nothing."""
    fresh = EchoJob(job.folder)
    output = job.folder / "fresh"
    shutil.rmtree(output, ignore_errors=True)
    fresh.run(client, **{"output": str(output), **options})
    expected = pa.concat_tables(pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))).to_pylist()
    assert sorted(expected, key=lambda row: row["id"]) == job.rows()


def test_a_grown_table_has_its_new_rows_computed_and_no_other(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(120)
    echo_job.write_input(rows[:20])
    echo_job.run(shared_client)
    before = {row["id"]: row for row in echo_job.rows()}
    echo_job.write_input(rows)
    planned = lorabatch.plan(**echo_job.options(update=True))
    assert "update: 20 rows keep their answers, 100 new" in planned.to_text()
    size = sum(path.stat().st_size for path in echo_job.output.glob("part-*.parquet"))
    assert planned.to_json()["update"] == {
        **dict.fromkeys(("changed", "unanswered", "removed"), 0), "kept": 20, "new": 100, "reasons": (),
        "kept_bytes": size,
    }  # fmt: skip
    assert (
        f", without the time to read parts of {size / 1e6:,.1f} MB for the answers that are kept" in planned.to_text()
    )
    assert sum(share["num_rows"] for share in planned.to_json()["adapters"]) == 100
    result = echo_job.run(shared_client, update=True)
    assert (result.num_rows, result.num_reused, result.num_errors) == (120, 20, 0)
    echo_job.assert_answered(rows)
    assert all(before[row["id"]] == row for row in echo_job.rows() if row["id"] in before)
    assert {path.name for path in echo_job.output.iterdir()} == {"_SUCCESS", "_lorabatch", *echo_job.parts()}
    assert echo_job.store.update_names() == []


def reordered(rows: Rows) -> Rows:
    return rows[::-1]


def with_a_column_more(rows: Rows) -> Rows:
    return [{**row, "reviewer": f"r{row['id'] % 3}"} for row in rows]


def with_ten_rows_less(rows: Rows) -> Rows:
    return rows[10:]


def with_ten_other_prompts(rows: Rows) -> Rows:
    return [{**row, "prompt_token_ids": [7, 7, row["id"] + 3]} if row["id"] < 10 else row for row in rows]


def with_ten_other_adapters(rows: Rows) -> Rows:
    return [
        {**row, "adapter": "rank1" if row["adapter"] != "rank1" else None} if row["id"] < 10 else row for row in rows
    ]


def with_all_of_it(rows: Rows) -> Rows:
    return [*reordered(with_a_column_more(with_ten_other_prompts(rows)))[3:], *with_a_column_more(make_rows(55)[50:])]


def as_they_were(rows: Rows) -> Rows:
    return rows


@pytest.mark.parametrize(
    ("edit", "options", "expected"),
    [
        pytest.param(with_all_of_it, {}, {"kept": 37, "changed": 10, "removed": 3, "new": 5}, id="everything"),
        pytest.param(reordered, {}, {"kept": 50}, id="reordered", marks=pytest.mark.long),
        pytest.param(with_a_column_more, {}, {"kept": 50}, id="column", marks=pytest.mark.long),
        pytest.param(with_ten_rows_less, {}, {"kept": 40, "removed": 10}, id="removed", marks=pytest.mark.long),
        pytest.param(with_ten_other_prompts, {}, {"kept": 40, "changed": 10}, id="prompts", marks=pytest.mark.long),
        pytest.param(with_ten_other_adapters, {}, {"kept": 40, "changed": 10}, id="adapters", marks=pytest.mark.long),
        pytest.param(as_they_were, {"max_tokens": 5}, {"changed": 50}, id="max_tokens", marks=pytest.mark.long),
        pytest.param(as_they_were, {"mode": "unmerged"}, {"changed": 50}, id="mode", marks=pytest.mark.long),
        pytest.param(as_they_were, {"rows_per_shard": 7}, {"kept": 50}, id="shards", marks=pytest.mark.long),
        pytest.param(as_they_were, {"output_prefix": "a_"}, {"kept": 50}, id="prefix", marks=pytest.mark.long),
        pytest.param(as_they_were, {"n": 3, "samples": "lists"}, {"changed": 50}, id="n", marks=pytest.mark.long),
    ],
)
def test_an_update_has_the_answers_of_a_fresh_job_and_counts_what_it_keeps(
    shared_client: Any,
    echo_job: EchoJob,
    edit: Callable[[Rows], Rows],
    options: dict[str, Any],
    expected: dict[str, int],
) -> None:
    rows = make_rows(50)
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    echo_job.write_input(edit(rows), rows_per_group=16)
    result = echo_job.run(shared_client, update=True, **options)
    assert counts(echo_job) == expected
    if "n" not in options:
        assert result.num_reused == expected.get("kept", 0)
    assert_like_a_fresh_job(shared_client, echo_job, **options)


def test_an_update_starts_engines_only_if_a_row_is_computed(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    before = set(engine_processes())
    engines: set[int] = set()

    def look(state: JobState) -> bool:
        engines.update(engine_processes())
        return False

    watcher = Watcher(look, lambda: None)
    echo_job.write_input(with_a_column_more(reordered(rows[5:])))
    result = echo_job.run(shared_client, watcher, update=True)
    assert (result.num_rows, result.num_reused) == (35, 35)
    assert engines <= before
    phases = {state.phase for state in watcher.states}
    assert {"planning", "running", "done"} <= phases
    assert "loading engines" not in phases
    assert_like_a_fresh_job(shared_client, echo_job)
    # One row that asks something else needs them, and so does one more row, for which they start at once.
    changed = [*rows[5:39], {**rows[39], "prompt_token_ids": [9, 9, 9]}]
    for table in (changed, [*changed, rows[0]]):
        echo_job.write_input(table)
        opened = open_job(JobSpec(**echo_job.options(update=True)))
        sources = [opened.store.source(name).read_record() for name in opened.record.sources]
        assert computes_rows(opened.record, sources) == (len(table) > 35)
        other = opened.record.spec.model_copy(update={"mode": "unmerged"})
        assert computes_rows(opened.record.model_copy(update={"spec": other}), sources)
        before, watcher.states = set(engine_processes()), []
        assert echo_job.run(shared_client, watcher, update=True).num_reused == len(table) - 1
        assert engines - before
        assert "loading engines" in {state.phase for state in watcher.states}
        echo_job.assert_answered(table)


def engine_processes() -> list[int]:
    return [process.pid for process in processes_of(os.getpid(), "engine")]


@pytest.mark.long
@pytest.mark.parametrize("which", ["model", "adapter"])
def test_rows_of_replaced_weights_are_computed_again(shared_client: Any, echo_job: EchoJob, which: str) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    if which == "adapter":
        shutil.rmtree(echo_job.adapters / "rank1")
        shutil.copytree(echo_job.adapters / "rank8", echo_job.adapters / "rank1")
    else:
        config = json.loads((echo_job.model / "config.json").read_text())
        (echo_job.model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    echo_job.run(shared_client, update=True)
    assert counts(echo_job) == ({"kept": 30, "changed": 10} if which == "adapter" else {"changed": 40})
    reasons = echo_job.store.read_plan_facts()["update"]["reasons"]
    assert reasons == ([] if which == "adapter" else ["the base model has another content"])
    assert_like_a_fresh_job(shared_client, echo_job)


def write_csv(path: Path, rows: Sequence[tuple[Any, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "adapter", "prompt"), *rows])


def test_a_csv_that_has_grown_is_updated_and_its_old_conversion_goes(shared_client: Any, echo_job: EchoJob) -> None:
    rows = [(f"r{i}", ["", "rank1"][i % 2], f"the quick brown fox {i}") for i in range(60)]
    path = echo_job.folder / "rows.csv"
    write_csv(path, rows[:50])
    given = {"input": str(path)}
    echo_job.run(shared_client, **given)
    write_csv(path, rows)
    with pytest.raises(OutputConflictError, match="--update"):
        echo_job.run(shared_client, **given)
    echo_job.run(shared_client, **given, update=True)
    assert counts(echo_job) == {"kept": 50, "new": 10}
    assert len(list((echo_job.output / "_lorabatch" / "input").iterdir())) == 1
    assert_like_a_fresh_job(shared_client, echo_job, **given)


def test_an_update_with_nothing_to_do_says_so_and_starts_nothing(echo_job: EchoJob, shared_client: Any) -> None:
    echo_job.write_input(make_rows(20))
    echo_job.run(shared_client, update=True)
    parts = echo_job.parts()
    watcher = Watcher(lambda state: False, lambda: None)
    assert echo_job.run(progress=watcher, update=True).num_rows == 20
    assert watcher.states == []
    assert watcher.notes == ["This job is done already, and nothing has changed since. Nothing was run."]
    assert echo_job.parts() == parts
    assert "20 rows keep their answers, none is computed" in lorabatch.plan(**echo_job.options(update=True)).to_text()


def test_rows_without_ids_of_their_own_are_refused_with_what_to_do(echo_job: EchoJob) -> None:
    rows = [{name: value for name, value in row.items() if name != "id"} for row in make_rows(8)]
    echo_job.write_input(rows)
    for call in (echo_job.run, lambda **options: lorabatch.plan(**echo_job.options(**options))):
        with pytest.raises(JobRequestError, match=r"--column id=NAME, or make ids .* with --id-from-content"):
            call(update=True)
    assert not echo_job.output.exists()
    with pytest.raises(JobRequestError, match="update, overwrite"):
        echo_job.run(update=True, overwrite=True)
    with pytest.raises(JobRequestError, match="update: needs the output"):
        lorabatch.plan(**{**echo_job.options(update=True, id_from_content=True), "output": None})
    echo_job.write_input(make_rows(8))
    with pytest.raises(JobRequestError, match="id_from_content: the input has ids in column 'id'"):
        echo_job.run(id_from_content=True)


def test_ids_of_content_stay_when_rows_move_and_columns_come(shared_client: Any, echo_job: EchoJob) -> None:
    rows = [{name: value for name, value in row.items() if name != "id"} for row in make_rows(30)]
    given = {"id_from_content": True}
    echo_job.write_input(rows[:20])
    echo_job.run(shared_client, **given)
    echo_job.write_input([{**row, "day": 2} for row in rows[:4:-1]])
    echo_job.run(shared_client, update=True, **given)
    assert counts(echo_job) == {"kept": 15, "new": 10, "removed": 5}
    assert_like_a_fresh_job(shared_client, echo_job, **given)
    echo_job.write_input([*rows, rows[3]])
    with pytest.raises(InputRowsError, match=r"1 ids? .*input.parquet:3, input.parquet:30"):
        echo_job.run(shared_client, update=True, **given)


@pytest.mark.long
def test_a_table_with_an_id_twice_is_refused_and_the_answers_stay(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(20)
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    echo_job.write_input([*rows, rows[3]])
    with pytest.raises(InputRowsError, match=r"input.parquet:3, input.parquet:20"):
        echo_job.run(shared_client, update=True)
    echo_job.assert_answered(rows)
    assert (echo_job.output / "_SUCCESS").exists()
    # the table as it was is not an update's any more
    echo_job.write_input([*rows, *make_rows(21)[20:]])
    assert echo_job.run(shared_client, update=True).num_reused == 20


@pytest.mark.long
def test_rows_that_ended_in_errors_are_tried_again(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    adapters = open_job(JobSpec(**echo_job.options(output=str(echo_job.folder / "other")))).record.adapters
    echo_job.set_engine(refuse_adapters=[adapter.sha256 for adapter in adapters if adapter.name == "rank1"])
    assert echo_job.run(shared_client, max_errors="100%").num_errors == 10
    echo_job.set_engine()
    assert echo_job.run(shared_client, update=True, max_errors="100%", engine_threads=1).num_errors == 0
    assert counts(echo_job) == {"kept": 30, "unanswered": 10}
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_rows_of_a_job_that_was_left_are_kept_from_parts_and_journals(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(180)
    echo_job.write_input(rows[:160])
    echo_job.set_engine(step_s=0.1)
    with pytest.raises(JobInterruptedError):
        echo_job.run(shared_client, Watcher(lambda state: state.shards_done >= 2, interrupt))
    done = len(echo_job.rows())
    assert 16 <= done < 160
    echo_job.set_engine()
    echo_job.write_input(rows)
    result = echo_job.run(shared_client, update=True)
    found = counts(echo_job)
    assert found["kept"] == result.num_reused >= done
    assert (found["new"], found["kept"] + found["unanswered"]) == (20, 160)
    echo_job.assert_answered(rows)


def interrupt() -> None:
    raise KeyboardInterrupt


def start_update(job: EchoJob) -> subprocess.Popen[bytes]:
    """The update in a process of its own."""
    options = job.folder / "options.json"
    options.write_text(json.dumps(job.options(update=True)))
    return subprocess.Popen([sys.executable, str(ECHO_FOLDER / "echo_run.py"), str(options)])


def answers_in(job: EchoJob) -> int:
    return duckdb.sql(f"SELECT count(DISTINCT id) FROM '{job.output}/*.parquet'").fetchall()[0][0]


@pytest.mark.chaos
@pytest.mark.parametrize("goes_on_by", ["resume", pytest.param("update", marks=pytest.mark.long)])
def test_an_update_killed_in_the_middle_leaves_the_old_answers_whole_and_goes_on(
    shared_client: Any, echo_job: EchoJob, goes_on_by: str
) -> None:
    rows = make_rows(200)
    echo_job.write_input(rows[:40])
    echo_job.run(shared_client)
    old = echo_job.parts()
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.05)
    process = start_update(echo_job)
    left = echo_job.output / "_lorabatch" / "update-001"
    wait_until(lambda: len(list(left.glob("part-*.parquet"))) >= 3 or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert echo_job.parts() == old
    assert (echo_job.output / "_SUCCESS").exists()
    assert answers_in(echo_job) == 40
    status = read_status(echo_job.store.latest())
    assert (status.is_finished, status.record.sources, status.output) == (False, ("",), str(echo_job.output))
    kept = sum(pq.read_metadata(part).num_rows for part in left.glob("part-*.parquet"))
    echo_job.set_engine()
    if goes_on_by == "resume":
        command = [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "resume", str(echo_job.output), "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(ended.stdout)["summary"]["num_reused"] >= kept
    else:
        assert echo_job.run(update=True).num_reused >= kept
    echo_job.assert_answered(rows)
    assert answers_in(echo_job) == 200
    assert read_status(echo_job.store.latest()).is_finished


@pytest.mark.long
def test_an_update_of_another_table_takes_over_what_one_that_was_left_has_answered(
    shared_client: Any, echo_job: EchoJob
) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows[:40])
    echo_job.run(shared_client)
    echo_job.write_input(rows[:200])
    echo_job.set_engine(step_s=0.1)
    with pytest.raises(JobInterruptedError):
        echo_job.run(shared_client, Watcher(lambda state: state.rows_done >= 80, interrupt), update=True)
    echo_job.set_engine()
    echo_job.write_input(rows[20:])
    result = echo_job.run(shared_client, update=True)
    found = counts(echo_job)
    assert found["kept"] == result.num_reused >= 60
    assert found["removed"] == 20
    echo_job.assert_answered(rows[20:])
    assert echo_job.store.update_names() == []


@pytest.mark.long
def test_updates_of_updates_go_on_for_as_long_as_the_table_grows(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(60)
    for num_rows, num_kept in ((20, 0), (40, 20), (60, 40)):
        echo_job.write_input(rows[:num_rows])
        assert echo_job.run(shared_client, update=True).num_reused == num_kept
    echo_job.assert_answered(rows)
    status = read_status(echo_job.store)
    assert status.is_finished
    assert status.state is not None
    assert (status.state.phase, status.state.rows) == ("done", 60)
    assert any("update: 40 rows keep their answers, 20 new" in note for note in status.state.notes)


@pytest.mark.long
def test_an_update_on_an_object_store(shared_client: Any, echo_job: EchoJob, bucket: Any) -> None:
    rows = make_rows(60)
    given = {"output": "s3://bucket/answers", "storage_options": bucket.options}
    echo_job.write_input(rows[:40])
    echo_job.run(shared_client, **given)
    echo_job.write_input(rows[10:])
    assert echo_job.run(shared_client, update=True, **given).num_reused == 30
    found = lorabatch.Job(given["output"], bucket.options).to_arrow().to_pylist()
    assert sorted(row["id"] for row in found) == list(range(10, 60))
