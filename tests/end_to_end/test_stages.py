"""Jobs with stages on real workers: each row's answers are those that asking stage by stage gives, whatever happens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from echo_engine import answer
from echo_job import ECHO_FOLDER, EchoJob, Watcher, kill_one, wait_until

import lorabatch
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.jobs.comparison import compare_answers
from lorabatch.jobs.contents import part_name
from lorabatch.jobs.errors import ErrorBudgetError, JobRequestError
from lorabatch.jobs.openai_batch.exporting import export_batch
from lorabatch.jobs.report.page import write_report
from lorabatch.pipeline.compare import compare
from lorabatch.pipeline.planning.plan import read_plan
from lorabatch.scheduler.messages import CanaryAnswered

Rows = list[dict[str, Any]]
STAGES: dict[str, Any] = {
    "draft": {"adapter": {"column": "tenant"}, "prompt": "{{ body }}", "n": 2},
    "check": {"for_each": "draft", "adapter": "rank8", "prompt": "{{ draft.completion }}", "max_tokens": 2},
    "note": {"adapter": None, "prompt": "{{ body }}: {{ check[0].completion }}", "max_tokens": 3},
    "fix": {"when": "'a' in note.completion", "adapter": "rank20", "prompt": "{{ note.completion }}!"},
}


def make_rows(num_rows: int) -> Rows:
    tenants = [None, "rank1", "rank8"]
    return [{"id": i, "tenant": tenants[i % 3], "body": f"parcel {i} of {i % 7}"} for i in range(num_rows)]


def options(**more: Any) -> dict[str, Any]:
    return {"stages": STAGES, **more}


def expected_rows(job: EchoJob, rows: Rows) -> Rows:
    """The completions that asking stage by stage gives."""
    tokenizer = Tokenizer.from_folder(job.model)
    sha = {adapter.name: adapter.sha256 for adapter in job.record.adapters} | {None: None}

    def ask(text: str, adapter: str | None, max_tokens: int) -> str:
        (tokens,) = tokenizer.encode_batch([text], is_rendered=False)
        return answer(tokens, sha[adapter], max_tokens)

    found = []
    for row in rows:
        draft = ask(row["body"], row["tenant"], 4)
        check = ask(draft, "rank8", 2)
        note = ask(f"{row['body']}: {check}", None, 3)
        fix = ask(f"{note}!", "rank20", 4) if "a" in note else None
        found.append({"id": row["id"], "draft": [draft] * 2, "check": [check] * 2, "note": note, "fix": fix})
    return found


def completions(job: EchoJob) -> Rows:
    """The completions in the output, in order of their rows."""

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(item) for item in value]
        return None if value is None else value["completion"]

    names = ["draft", "check", "note", "fix"]
    return [{"id": row["id"], **{name: text(row[name]) for name in names}} for row in job.rows()]


def traced_tokens(path: Path) -> int:
    return sum(map(int, path.read_text().split())) if path.exists() else 0


def test_answers_are_those_of_asking_stage_by_stage(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(60)
    echo_job.write_input(rows)
    result = echo_job.run(shared_client, **options())
    assert (result.num_rows, result.num_errors) == (60, 0)
    expected = expected_rows(echo_job, rows)
    assert completions(echo_job) == expected
    assert 0 < sum(row["fix"] is None for row in expected) < 60
    table = pq.read_table(echo_job.output)
    assert table.column_names == ["id", "tenant", "body", "draft", "check", "note", "fix", "error", "attempts"]
    sha = {adapter.name: adapter.sha256 for adapter in echo_job.record.adapters}
    assert {row["note"]["adapter_sha256"] for row in table.to_pylist()} == {None}
    assert {row["check"][1]["adapter_sha256"] for row in table.to_pylist()} == {sha["rank8"]}
    by_adapter = {outcome.adapter: outcome.num_rows for outcome in result.adapters}
    num_fixed = sum(row["fix"] is not None for row in expected)
    assert by_adapter == {"": 40 + 60, "rank1": 40, "rank8": 40 + 120, "rank20": num_fixed}


def test_the_output_has_the_stages_that_were_asked_for(shared_client: Any, echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(5))
    echo_job.run(shared_client, **options(output_columns=["fix", "note"]))
    assert pq.read_table(echo_job.output).column_names == ["id", "tenant", "body", "note", "fix", "error", "attempts"]


def test_what_needs_one_completion_of_a_row_is_refused(shared_client: Any, echo_job: EchoJob, tmp_path: Path) -> None:
    echo_job.write_input(make_rows(5))
    echo_job.run(shared_client, **options())
    store = echo_job.store
    for refused in (
        lambda: export_batch(store, str(tmp_path / "results.jsonl"), {}),
        lambda: compare(store, store.read_record().spec, 3),
        lambda: compare_answers(store, store),
    ):
        with pytest.raises(JobRequestError, match=r"have stages \(draft, check, note, fix\)"):
            refused()
    assert not (tmp_path / "results.jsonl").exists()
    report = write_report(echo_job.store)
    assert "Stages: draft 10 requests" in report


def test_outputs_are_the_same_bytes_whatever_is_in_a_shard(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(50)
    echo_job.write_input(rows)
    found = []
    for rows_per_shard in (7, 50):
        echo_job.run(shared_client, **options(rows_per_shard=rows_per_shard, overwrite=bool(found)))
        found.append([{**row, "attempts": 1} for row in echo_job.rows()])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [pytest.param("engine", marks=pytest.mark.long), "worker"])
def test_a_kill_costs_no_answer_and_repeats_none(echo_job: EchoJob, kind: str) -> None:
    rows = make_rows(120)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.02)
    watcher = Watcher(lambda state: state.rows_done > 15, lambda: kill_one(kind))
    echo_job.run(progress=watcher, **options())
    assert watcher.has_acted
    assert completions(echo_job) == expected_rows(echo_job, rows)


@pytest.mark.long
def test_a_killed_command_resumes_with_the_answers_that_it_had(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(120)
    echo_job.write_input(rows)
    trace = tmp_path / "trace"
    echo_job.set_engine(step_s=0.05, trace=str(trace))
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(echo_job.options(**options())))
    words = [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "run", str(job_file)]
    client = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(echo_job.output.glob("part-*.parquet"))) >= 2)
    client.kill()
    client.wait(60)
    before = traced_tokens(trace)
    echo_job.set_engine(trace=str(trace))
    result = echo_job.run(**options())
    assert completions(echo_job) == expected_rows(echo_job, rows)
    assert result.num_reused >= 16
    whole = sum(2 * 4 + 2 * 2 + 3 + 4 * (row["fix"] is not None) for row in completions(echo_job))
    # What was generated before the kill and not yet journalled is generated again, of the parts nothing.
    assert before < whole
    assert traced_tokens(trace) - before < whole - 16 * 11


def run_traced(job: EchoJob, client: Any, trace: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the job; returns its input and its rows. `trace`: file for the tokens of the runs after this one."""
    rows = make_rows(40)
    job.write_input(rows)
    job.set_engine(trace=str(trace))
    job.run(client, **options())
    trace.unlink()
    return rows, completions(job)


@pytest.mark.long
def test_a_canary_measures_the_tokens_of_all_stages(shared_client: Any, echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(60))
    result = echo_job.run(shared_client, canary=5, **options())
    assert (result.num_rows, result.num_errors) == (60, 0)
    facts = echo_job.store.read_canary()
    assert facts is not None
    canary = [shard.shard_id for shard in read_plan(echo_job.store).shards if shard.is_canary]
    rows = [row for shard_id in canary for row in pq.read_table(echo_job.output / part_name(shard_id)).to_pylist()]
    sha = {adapter.name: adapter.sha256 for adapter in echo_job.record.adapters}
    tokens: Counter[str | None] = Counter()
    for row in rows:
        tokens[sha.get(row["tenant"])] += 2 * 4 + 2 * 2 + 3 + 4 * (row["fix"] is not None)
    event = CanaryAnswered.from_json(facts["event"])
    assert isinstance(event, CanaryAnswered)
    assert sum(found.num_rows for found in event.answers) == len(rows) == 15
    measured: Counter[str | None] = Counter()
    for found in event.answers:
        measured[found.adapter_id] += found.output_tokens
    assert measured == tokens


def test_a_changed_judge_is_asked_again_and_what_its_change_reaches(
    shared_client: Any, echo_job: EchoJob, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    rows, before = run_traced(echo_job, shared_client, trace)
    shutil.rmtree(echo_job.adapters / "rank20")
    shutil.copytree(echo_job.adapters / "rank1", echo_job.adapters / "rank20")
    echo_job.run(shared_client, **options())
    after = completions(echo_job)
    assert after == expected_rows(echo_job, rows)
    assert [row | {"fix": None} for row in after] == [row | {"fix": None} for row in before]
    assert traced_tokens(trace) == 4 * sum(row["fix"] is not None for row in before)


def test_an_update_asks_what_a_changed_template_reaches(shared_client: Any, echo_job: EchoJob, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    rows, before = run_traced(echo_job, shared_client, trace)
    changed = {**STAGES, "note": {**STAGES["note"], "prompt": "{{ body }} - {{ check[0].completion }}"}}
    result = echo_job.run(shared_client, stages=changed, update=True)
    after = completions(echo_job)
    assert result.num_rows == 40
    assert [(row["draft"], row["check"]) for row in after] == [(row["draft"], row["check"]) for row in before]
    assert all(row["note"] != other["note"] for row, other in zip(after, before, strict=True))
    assert traced_tokens(trace) == 40 * 3 + 4 * sum(row["fix"] is not None for row in after)
    trace.unlink()
    echo_job.write_input([*rows, *make_rows(44)[40:]])
    result = echo_job.run(shared_client, stages=changed, update=True)
    assert (result.num_rows, result.num_reused) == (44, 40)
    num_fixed = sum(row["fix"] is not None for row in completions(echo_job)[40:])
    assert traced_tokens(trace) == 4 * (2 * 4 + 2 * 2 + 3) + 4 * num_fixed


def test_rows_that_cannot_be_asked_cost_only_themselves(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(20)
    rows[3]["body"] = None
    rows[5]["tenant"] = "nobody"
    echo_job.write_input(rows)
    with pytest.raises(ErrorBudgetError):
        echo_job.run(shared_client, **options(max_errors=1))
    result = echo_job.run(shared_client, **options(max_errors=2))
    assert (result.num_rows, result.num_errors) == (20, 2)
    found = echo_job.rows()
    assert "body" in found[3]["error"]
    assert "nobody" in found[5]["error"]
    assert [row["id"] for row in found if row["note"] is None] == [3, 5]
    right = [row for row in rows if row["id"] not in (3, 5)]
    assert [row for row in completions(echo_job) if row["id"] not in (3, 5)] == expected_rows(echo_job, right)


def test_a_stage_that_fails_makes_an_error_row_and_not_more(shared_client: Any, echo_job: EchoJob) -> None:
    rows = make_rows(12)
    echo_job.write_input(rows)
    stages = {
        **STAGES,
        "note": {"adapter": None, "prompt": "{{ body if row['id'] != 4 else [] }} {{ check[0].completion }}"},
    }
    result = echo_job.run(shared_client, stages=stages, max_errors=1)
    assert result.num_errors == 1
    found = echo_job.rows()
    assert "stages.note" in found[4]["error"]
    assert found[4]["note"]["error"] == found[4]["error"]
    assert (found[4]["draft"][0]["error"], found[4]["fix"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": {"draft": {"prompt": "{{ boddy }}"}}}, "boddy"),
        ({"stages": {"draft": {"prompt": "{{ body }}", "adapter": "rank9"}}}, "rank9"),
        ({"stages": {"body": {"prompt": "{{ id }}"}}}, "the input has a column of this name"),
        ({"output_columns": ["fixed"]}, "no such stage"),
        ({"stages": {"draft": {"prompt": "{{ body }}", "max_tokens": 0}}}, "max_tokens=0"),
    ],
)
def test_a_job_with_wrong_stages_is_refused_before_it_starts(
    echo_job: EchoJob, change: dict[str, Any], said: str
) -> None:
    echo_job.write_input(make_rows(3))
    with pytest.raises(JobRequestError, match=said):
        lorabatch.plan(**echo_job.options(**options(**change)))
    assert not echo_job.output.exists()


def plain_job(rows: Rows, template: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The answers of a job without stages whose rows are these."""
    shutil.rmtree(folder, ignore_errors=True)
    lorabatch.run(input=rows, output=str(folder), messages_template=[{"role": "user", "content": template}], **options)
    return sorted(pq.read_table(folder).to_pylist(), key=lambda row: row["id"])


def test_engines_give_what_one_job_after_the_other_gives(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Greedy stages of real engines: a draft, a choice with probabilities, a pick, and a turn that goes on."""
    common: dict[str, Any] = {
        "model": tiny_llama,
        "adapters": {name: tiny_adapters[name] for name in ("rank1", "rank8")},
        "mode": "exact",
        "max_tokens": 6,
        "workers": 1,
        "ignore_eos": False,
    }
    rows = [{"id": i, "body": f"the quick fox {i}", "topic": f"fox {i % 3}"} for i in range(10)]
    stages: dict[str, Any] = {
        "draft": lorabatch.Stage(adapter="rank1", messages="{{ body }}"),
        "judge": lorabatch.Stage(adapter="rank8", messages="{{ draft.completion }} {{ topic }}", choice=["the", "fox"]),
        "fix": lorabatch.Stage(when="judge.choice == 'the' and id in [1, 4, 5]", continues="draft", messages="again"),
    }
    lorabatch.run(input=rows, output=str(tmp_path / "staged"), stages=stages, **common)
    found = sorted(pq.read_table(tmp_path / "staged").to_pylist(), key=lambda row: row["id"])
    drafts = plain_job([{**row, "adapter": "rank1"} for row in rows], "{{ body }}", tmp_path / "job", **common)
    assert [row["draft"]["completion"] for row in found] == [row["completion"] for row in drafts]
    drafted = [{**row, "adapter": "rank8", "draft": one["completion"]} for row, one in zip(rows, drafts, strict=True)]
    judged = plain_job(drafted, "{{ draft }} {{ topic }}", tmp_path / "job", choice=["the", "fox"], **common)
    for row, one in zip(found, judged, strict=True):
        shares = {share["choice"]: share["probability"] for share in one["choice_probabilities"]}
        assert (row["judge"]["choice"], row["judge"]["probability"]) == (one["choice"], shares)
    turns = [
        {
            "id": row["id"],
            "adapter": "rank1",
            "messages": [
                {"role": "user", "content": row["body"]},
                {"role": "assistant", "content": one["completion"]},
                {"role": "user", "content": "again"},
            ],
        }
        for row, one in zip(rows, drafts, strict=True)
    ]
    shutil.rmtree(tmp_path / "job")
    lorabatch.run(input=turns, output=str(tmp_path / "job"), **common)
    fixed = {row["id"]: row["completion"] for row in pq.read_table(tmp_path / "job").to_pylist()}
    chosen = [row for row in found if row["judge"]["choice"] == "the" and row["id"] in (1, 4, 5)]
    assert chosen
    assert [row["fix"]["completion"] for row in chosen] == [fixed[row["id"]] for row in chosen]
    assert all(row["fix"] is None for row in found if row not in chosen)


def test_rounds_draw_anew_and_end_when_their_condition_holds(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "body": f"the quick fox {i}"} for i in range(16)]
    stages: dict[str, Any] = {"draft": lorabatch.Stage(messages="{{ body }}", temperature=1.0, max_tokens=5)}
    until = {"stage": "draft", "is": "'e' in draft.completion", "rounds": 4}
    options: dict[str, Any] = {"model": tiny_llama, "input": rows, "stages": stages, "workers": 1, "mode": "exact"}
    result = lorabatch.run(output=str(tmp_path / "once"), **options)
    again = lorabatch.run(output=str(tmp_path / "rounds"), until=until, **options)
    once, rounds = (
        sorted(pq.read_table(tmp_path / name).to_pylist(), key=lambda row: row["id"]) for name in ("once", "rounds")
    )
    right = [row["id"] for row in once if "e" in row["draft"]["completion"]]
    assert 0 < len(right) < 16
    assert [rounds[i] for i in right] == [once[i] for i in right]
    others = [i for i in range(16) if i not in right]
    assert all(rounds[i]["draft"]["completion"] != once[i]["draft"]["completion"] for i in others)
    assert 16 + len(others) <= again.stages["draft"]["requests"] <= 16 + 3 * len(others)
    assert result.stages["draft"]["requests"] == 16


def test_a_continued_stage_reads_the_pages_of_its_conversation(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "body": f"{i} {'the quick brown fox ' * 4}{i}"} for i in range(12)]
    stages: dict[str, Any] = {
        "draft": lorabatch.Stage(messages="{{ body }}", max_tokens=5),
        "fix": lorabatch.Stage(continues="draft", messages="Shorter.", max_tokens=5),
    }
    options: dict[str, Any] = {"model": tiny_llama, "input": rows, "stages": stages, "workers": 1}
    result = lorabatch.run(output=str(tmp_path / "output"), **options)
    assert result.num_errors == 0
    assert (result.prefix_hit_rate or 0) > 0.25
