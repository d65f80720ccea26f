"""Whole jobs: rows in are rows out, each once, each right; what is wrong costs what it must cost and no more."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, Future
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.console.progress import status_lines
from lorabatch.jobs.errors import ErrorBudgetError, InputRowsError, JobFailedError, OutputConflictError
from lorabatch.jobs.history import read_history
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.status.job_status import read_status
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline import run as run_module
from lorabatch.pipeline.cluster.devices import find_device, find_device_of_workers
from lorabatch.pipeline.messages import EngineSettings
from lorabatch.pipeline.planning.dry_run import dry_run
from lorabatch.pipeline.planning.plan import read_plan, serving_adapters
from lorabatch.pipeline.planning.simulate import SimulationRequest, make_job
from lorabatch.pipeline.worker.registration import register_plugin
from lorabatch.scheduler.estimates.lengths import AnswerLengths
from lorabatch.scheduler.messages import BEGINNING, Command, Event, RunShard
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings

POISON = 77


def test_rows_in_are_rows_out_with_their_columns(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(150)
    echo_job.write_input(rows)
    result = echo_job.run(shared_client)
    echo_job.assert_answered(rows)
    assert (result.num_rows, result.num_errors, result.num_parts) == (150, 0, len(echo_job.parts()))
    assert {row["note"] for row in echo_job.rows()} == {row["note"] for row in rows}
    assert (echo_job.output / "_SUCCESS").exists()
    assert {count.adapter: count.num_rows for count in result.adapters}["rank8"] == 37


@pytest.mark.long
def test_a_run_says_once_that_compiled_kernels_are_missing(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.cluster.devices.lacks_compiled_kernels", lambda: True)
    notes: list[str] = []
    monkeypatch.setattr(run_module.SilentProgress, "note", lambda _, text: notes.append(text))
    echo_job.write_input(make_rows(20))
    echo_job.run(shared_client, device="cpu")
    assert sum(note.startswith("no compiled kernels for this CPU: about ") for note in notes) == 1


def test_a_job_that_finishes_while_its_failure_is_recorded_is_done(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_cluster(client: Client, run_id: str, future: Future[Any], *_: Any) -> Any:
        client.publish_dataset(future, name="held")
        raise JobFailedError("The Dask scheduler is gone.")

    def finish() -> None:
        gate.touch()
        shared_client.get_dataset("held").result(120)
        shared_client.unpublish_dataset("held")

    monkeypatch.setattr(run_module, "follow", lose_the_cluster)
    rows, gate = make_rows(20), echo_job.folder / "gate"
    echo_job.write_input(rows)
    echo_job.set_engine(gate=str(gate))
    # A failure is shown before it is written: as when the command is stopped in between.
    watcher = Watcher(lambda state: state.phase == "failed", finish)
    assert echo_job.run(shared_client, watcher).num_rows == 20
    assert watcher.has_acted
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "done"
    assert not (echo_job.output / "_lorabatch" / "tmp").exists()


def test_of_two_commands_at_the_same_moment_one_is_refused(echo_job: EchoJob, shared_client: Client) -> None:
    rows, gate = make_rows(60), echo_job.folder / "gate"
    echo_job.write_input(rows)
    echo_job.set_engine(gate=str(gate))

    def run(_: int) -> str:
        try:
            return str(echo_job.run(shared_client).num_rows)
        except OutputConflictError as error:
            return str(error)
        finally:
            gate.touch()

    with ThreadPoolExecutor(2) as pool:
        refusal, done = sorted(pool.map(run, range(2)), key=len, reverse=True)
    assert done == "60"
    assert "this job runs on the cluster already" in refusal
    echo_job.assert_answered(rows)
    assert read_status(echo_job.store).outcome == "done"


def test_a_job_that_was_finished_when_its_cluster_was_lost_is_done(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = run_module.follow

    def lose_the_cluster_at_the_end(*arguments: Any) -> Any:
        follow(*arguments)
        raise JobFailedError("The Dask scheduler is gone.")

    monkeypatch.setattr(run_module, "follow", lose_the_cluster_at_the_end)
    rows = make_rows(20)
    echo_job.write_input(rows)
    assert echo_job.run(shared_client).num_rows == 20
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "done"


@pytest.mark.long
def test_batches_stay_full_from_shard_to_shard_until_the_queue_is_empty(
    echo_job: EchoJob, shared_client: Client
) -> None:
    rows = make_rows(160)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.03)
    result = echo_job.run(shared_client, rows_per_shard=4, max_tokens=40)
    echo_job.assert_answered(rows, max_tokens=40)
    assert result.num_parts >= 40
    assert result.batch_fill is not None
    assert result.batch_fill >= 0.9
    assert f"{result.batch_fill:.1%} full while shards were queued" in "\n".join(
        status_lines(read_status(echo_job.store))
    )
    assert f"{result.batch_fill:.1%}" in write_report(echo_job.store)


def test_each_wrong_row_becomes_one_error_row_and_the_others_are_answered(
    echo_job: EchoJob, shared_client: Client
) -> None:
    rows = [row | {"temperature": None} for row in make_rows(60)]
    rows[5]["adapter"] = "rank88"
    rows[6]["prompt_token_ids"] = [5] * 400
    rows[7]["temperature"] = -1.0
    echo_job.write_input(rows)
    result = echo_job.run(shared_client, row_settings="temperature")
    errors = {row["id"]: row for row in echo_job.rows() if row["error"] is not None}
    assert set(errors) == {5, 6, 7}
    assert "did you mean 'rank8'" in errors[5]["error"]
    assert "400" in errors[6]["error"]
    assert "temperature=-1.0" in errors[7]["error"]
    assert {row["finish_reason"] for row in errors.values()} == {"error"}
    assert (result.num_rows, result.num_errors) == (60, 3)
    assert sum(kind.num_rows for kind in result.errors) == 3
    assert "3 error rows" in result.to_text()


def test_text_that_is_not_utf8_costs_its_own_rows_in_every_column_and_stays_as_it_was(
    echo_job: EchoJob, shared_client: Client
) -> None:
    def text(*values: bytes, others: str = "{}") -> pa.Array:
        raw = pa.array([*values, *(others.format(row).encode() for row in range(36))], pa.binary())
        return pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])

    written = {
        "id": text(b"a\xff", b"b", b"c", b"d"),
        "prompt": text(b"p", b"p", b"\xc3p", b"p"),
        "adapter": text(b"rank8", b"rank\xff", b"", b"", others=""),
        "note": text(b"n", b"n", b"n", b"n\xed\xa0\x80"),
    }
    pq.write_table(pa.table(written), echo_job.folder / "input.parquet")
    result = echo_job.run(shared_client, max_errors="30%")
    assert (result.num_rows, result.num_errors) == (40, 3)
    found = pa.concat_tables(pq.read_table(echo_job.output / name) for name in echo_job.parts())
    for name, values in written.items():
        assert sorted(found.column(name).cast(pa.binary()).to_pylist()) == sorted(values.cast(pa.binary()).to_pylist())
    errors = {e for e in found.column("error").to_pylist() if e}
    assert errors == {
        f"{role}: not valid UTF-8 text ({reason})."
        for role, reason in (
            ("id", "invalid start byte"),
            ("adapter", "invalid start byte"),
            ("prompt", "invalid continuation byte"),
        )
    }
    assert [c.num_errors for c in result.adapters if c.adapter == "rank\ufffd"] == [1]
    assert "a\ufffd" in write_report(echo_job.store)


@pytest.mark.long
def test_too_many_wrong_rows_stop_the_job_before_any_work(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(20, names=("no-such-adapter", "rank8"))
    echo_job.write_input(rows)
    with pytest.raises(ErrorBudgetError, match="10 of 20 rows"):
        echo_job.run(shared_client)
    assert echo_job.parts() == {}
    state = echo_job.store.read_state()
    assert state is not None
    assert (state.phase, state.rows_done) == ("failed", 0)
    echo_job.run(shared_client, max_errors="50%")
    assert len(echo_job.rows()) == 20


@pytest.mark.long
def test_an_id_in_two_rows_stops_a_job_before_an_engine_starts_until_it_is_corrected(
    echo_job: EchoJob, shared_client: Client
) -> None:
    rows = make_rows(20)
    echo_job.write_input([*rows, rows[3]])
    with pytest.raises(InputRowsError, match=r"1 id appears in more than one row: 3 at input\.parquet:3"):
        echo_job.run(shared_client)
    status = read_status(echo_job.store)
    assert (status.headline, status.next_step) == ("failed", None)
    assert [name for name in echo_job.store.read_logs() if name.startswith("engine")] == []
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    echo_job.assert_answered(rows)


def test_inputs_are_read_together_and_folder_names_name_adapters(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(24, names=("rank1", "rank8"))
    for name in ("rank1", "rank8"):
        folder = echo_job.folder / "rows" / f"adapter={name}"
        folder.mkdir(parents=True)
        own = [{"id": row["id"], "prompt_token_ids": row["prompt_token_ids"]} for row in rows if row["adapter"] == name]
        pq.write_table(pa.Table.from_pylist(own), folder / "x.parquet")
    more = [row | {"id": row["id"] + 100} for row in make_rows(8)]
    echo_job.write_input(more)
    echo_job.run(shared_client, input=[str(echo_job.folder / "rows"), str(echo_job.folder / "input.parquet")])
    echo_job.assert_answered(rows + more)


@pytest.mark.long
def test_a_row_that_kills_engines_becomes_one_error_row(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(60)
    rows[10]["prompt_token_ids"] = [POISON, POISON]
    for row in rows:
        if row["id"] != 10:
            row["prompt_token_ids"] = [3 + row["id"]] if row["id"] + 3 != POISON else [200]
    echo_job.write_input(rows)
    echo_job.set_engine(crash_on_token=POISON)
    result = echo_job.run(shared_client)
    errors = [row for row in echo_job.rows() if row["error"] is not None]
    assert [row["id"] for row in errors] == [10]
    assert "engine process died" in errors[0]["error"]
    assert errors[0]["attempts"] > 2
    assert [kind.kind for kind in result.errors] == ["engine"]


@pytest.mark.long
def test_engines_that_cannot_start_fail_the_job_with_their_reason(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(make_rows(20))
    echo_job.set_engine(fail_start="model.safetensors: tensor lm_head.weight is missing")
    with pytest.raises(JobFailedError, match=r"tensor lm_head\.weight is missing"):
        echo_job.run(shared_client)
    echo_job.set_engine()
    echo_job.run(shared_client)
    echo_job.assert_answered(make_rows(20))


@pytest.mark.long
def test_an_empty_input_is_a_finished_job_with_a_part_that_readers_can_open(
    echo_job: EchoJob, shared_client: Client
) -> None:
    schema = pa.Table.from_pylist(make_rows(4)).schema
    pq.write_table(schema.empty_table(), echo_job.folder / "input.parquet")
    result = echo_job.run(shared_client)
    assert (result.num_rows, result.num_parts) == (0, 1)
    # A run that was killed between this part and the end of the job.
    (echo_job.output / "_SUCCESS").unlink()
    assert echo_job.run(shared_client).num_parts == 1
    assert (echo_job.output / "_SUCCESS").exists()
    assert read_status(echo_job.store).num_parts == 1
    assert "<html" in write_report(echo_job.store)
    echo_job.write_input(make_rows(20))
    echo_job.run(shared_client, output=str(echo_job.folder / "rows"))
    found = pq.read_table(echo_job.output)
    assert found.num_rows == 0
    assert found.schema.equals(pq.read_table(echo_job.folder / "rows").schema)
    in_duckdb = duckdb.sql(f"FROM '{echo_job.output}/*.parquet'")
    assert (in_duckdb.columns, in_duckdb.fetchall()) == (found.column_names, [])


def test_a_finished_job_is_not_run_again(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(make_rows(40))
    first = echo_job.run(shared_client)
    parts = echo_job.parts()
    assert echo_job.run(shared_client) == first
    assert echo_job.parts() == parts


@pytest.mark.long
def test_another_job_is_refused_on_the_same_output_unless_it_may_be_overwritten(
    echo_job: EchoJob, shared_client: Client
) -> None:
    echo_job.write_input(make_rows(20))
    echo_job.run(shared_client)
    with pytest.raises(OutputConflictError, match="max_tokens: was 4, now 6"):
        echo_job.run(shared_client, max_tokens=6)
    echo_job.run(shared_client, max_tokens=6, overwrite=True)
    echo_job.assert_answered(make_rows(20), max_tokens=6)


def test_a_changed_adapter_recomputes_its_rows_and_no_others(
    echo_job: EchoJob, shared_client: Client, make_adapter: Callable[..., Path]
) -> None:
    rows = make_rows(80)
    echo_job.write_input(rows)
    echo_job.run(shared_client)
    before = {row["id"]: row for row in echo_job.rows()}
    shutil.rmtree(echo_job.adapters / "rank8")
    make_adapter(echo_job.adapters / "rank8", echo_job.model, seed=99)
    result = echo_job.run(shared_client)
    echo_job.assert_answered(rows)
    changed = [row["id"] for row in echo_job.rows() if row != before[row["id"]]]
    assert changed == [row["id"] for row in rows if row["adapter"] == "rank8"]
    assert result.num_reused == len(rows) - len(changed)


@pytest.mark.long
def test_a_refused_adapter_that_is_repaired_is_used_when_the_job_runs_again(
    echo_job: EchoJob, shared_client: Client
) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    config = echo_job.adapters / "rank8" / "adapter_config.json"
    good = config.read_text()
    config.write_text(json.dumps(json.loads(good) | {"r": 9}))
    assert echo_job.run(shared_client, max_errors="30%").num_errors == 10
    config.write_text(good)
    assert echo_job.run(shared_client, max_errors="30%").num_errors == 0
    echo_job.assert_answered(rows)


@pytest.mark.parametrize("policy", ["planner", pytest.param("dlora", marks=pytest.mark.long)])
def test_a_run_has_the_shards_and_the_settings_with_which_it_is_planned_and_simulated(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Fails where `plan` or `simulate` builds anything that a run builds by itself."""
    echo_job.write_input(make_rows(300))
    engines = []

    def register(client: Client, job_id: str, settings: EngineSettings, store: JobStore, **options: Any) -> str:
        engines.append(settings.config)
        return register_plugin(client, job_id, settings, store, **options)

    monkeypatch.setattr("lorabatch.pipeline.run.register_plugin", register)
    assert find_device_of_workers(shared_client, "auto") == find_device("auto")
    planned = dry_run(echo_job.options(policy=policy))
    _, simulated = make_job(
        SimulationRequest(echo_job.write_job_file(), None, 0, 0, 0.0, 2, (), None, None, 0, echo_job.folder)
    )
    assert simulated.under(policy) == planned.settings
    echo_job.run(shared_client, policy=policy)
    assert engines == [planned.settings.engine]
    scheduler = next(record for record in echo_job.store.read_events() if record["kind"] == BEGINNING)
    adapters = serving_adapters(echo_job.record)
    expected = json.loads(json.dumps(planned.settings.scheduler(2, adapters).to_json()))
    assert scheduler["settings"] | {"planned": None} == expected
    assert scheduler["settings"]["planned"]["predicted_s"] == planned.forecast.predicted_s
    plan = read_plan(echo_job.store)
    assert plan.shards == planned.forecast.plan.shards
    assert plan.predicted_s == planned.forecast.predicted_s


@pytest.mark.long
def test_later_jobs_expect_answers_as_long_as_those_of_earlier_ones(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", str(tmp_path / "history"))
    echo_job.write_input(make_rows(200))
    before = dry_run(echo_job.options())
    first = echo_job.run(shared_client)
    (kept,) = (tmp_path / "history").glob("*.json")
    lengths = AnswerLengths.joined(read_history(kept).lengths.values())
    assert lengths.num_rows == 200
    assert sum(tokens for _, _, tokens in lengths.classes.values()) == first.completion_tokens
    after = dry_run(echo_job.options())
    expected, answered = sum(s.predicted_output_tokens for s in after.forecast.plan.shards), first.completion_tokens
    guessed = sum(s.predicted_output_tokens for s in before.forecast.plan.shards)
    assert abs(expected - answered) < abs(guessed - answered) / 2
    # Engines are what they were: runs can share them, and mode exact has its hash.
    assert (after.settings.engine, after.settings.scheduler(2)) == (
        before.settings.engine,
        before.settings.scheduler(2),
    )
    kept.write_text("{")
    assert dry_run(echo_job.options()).forecast.plan.shards == before.forecast.plan.shards


def test_the_events_of_a_run_replay_to_the_same_commands(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(make_rows(100))
    echo_job.run(shared_client)
    plan = json.loads((echo_job.output / "_lorabatch" / "plan.json").read_text())
    recorded = echo_job.store.read_events()
    assert Counter(record["kind"] for record in recorded)["ShardCommitted"] == len(plan["shards"])
    assert replayed(plan, recorded) == [record for record in recorded if record["kind"] in Command.kinds]


def replayed(plan: dict[str, Any], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Commands of a fresh scheduler that handles the recorded events."""
    from lorabatch.scheduler.planning.waves import Shard

    shards = [Shard.from_json(shard) for shard in plan["shards"]]
    scheduler = Scheduler(shards, settings=SchedulerSettings(expected_replicas=2))
    events = [Event.from_json(record) for record in records if record["kind"] in Event.kinds]
    commands = [command for event in events for command in scheduler.handle(event)]
    assert any(isinstance(command, RunShard) for command in commands)
    return [json.loads(json.dumps(command.to_json())) for command in commands]
