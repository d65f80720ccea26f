"""Sweeps: every adapter answers every row, a further adapter computes its own answers only, and all are compared."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import echo_engine
import pytest
from echo_job import ECHO_FACTORY, EchoJob
from typer.testing import CliRunner

import lorabatch
from lorabatch.cli import app
from lorabatch.jobs.errors import JobRequestError, OutputConflictError
from lorabatch.jobs.report.page import write_report
from lorabatch.pipeline.compare import compare

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "eval_logs.py"
NAMES = ("rank1", "rank20", "rank8")


def answers(job: EchoJob) -> dict[tuple[int, str | None], str]:
    return {(row["id"], row["adapter"]): row["completion"] for row in job.rows()}


def test_a_further_checkpoint_computes_its_own_answers_only(
    shared_client: Any, echo_job: EchoJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    (echo_job.adapters / "rank64").rename(echo_job.folder / "rank64")
    rows = [{"id": i, "prompt_token_ids": [3 + i, 4], "label": "x"} for i in range(40)]
    echo_job.write_input(rows)
    asked: dict[str, Any] = {"for_each_adapter": "all", "include_base": True, "expected": "label"}
    result = echo_job.run(shared_client, **asked)
    assert (result.num_rows, result.num_errors) == (160, 0)
    sha = {adapter.name: adapter.sha256 for adapter in echo_job.record.adapters}
    right = {(i, n): echo_engine.answer([3 + i, 4], sha.get(n or ""), 4) for i in range(40) for n in (None, *NAMES)}
    before = answers(echo_job)
    assert before == right

    shutil.move(echo_job.folder / "rank64", echo_job.adapters / "rank64")
    with pytest.raises(OutputConflictError, match=r"for_each_adapter: was .*--update"):
        echo_job.run(shared_client, **asked)
    planned = lorabatch.plan(**echo_job.options(update=True, **asked))
    assert "update: 160 rows keep their answers, 40 new" in planned.to_text()
    result = echo_job.run(shared_client, update=True, **asked)
    assert (result.num_rows, result.num_reused) == (200, 160)
    found = answers(echo_job)
    assert {key: text for key, text in found.items() if key in before} == before
    assert Counter(name for _, name in found) == dict.fromkeys((None, *NAMES, "rank64"), 40)

    # the content of an adapter decides, and not its name
    (echo_job.adapters / "rank1").rename(echo_job.adapters / "first")
    planned = lorabatch.plan(**echo_job.options(update=True, **asked))
    assert "update: 200 rows keep their answers, none is computed" in planned.to_text()
    # a right answer that was corrected is no other question
    echo_job.write_input([{**row, "label": found[row["id"], "rank64"]} for row in rows])
    result = echo_job.run(shared_client, update=True, **asked)
    assert (result.num_rows, result.num_reused) == (200, 200)
    scores = {outcome.adapter: outcome.score["mean"] for outcome in result.adapters if outcome.score}
    assert scores == {"": 0.0, "first": 0.0, "rank20": 0.0, "rank64": 1.0, "rank8": 0.0}
    assert "+100.0%" in result.to_text()
    wide = lorabatch.Job(str(echo_job.output)).to_arrow(wide=True)
    assert {row["id"]: row["rank64"]["completion"] for row in wide.to_pylist()} == {
        i: found[i, "rank64"] for i in range(40)
    }
    logs = str(echo_job.folder / "logs")
    command = [str(echo_job.output), logs, "--format", "lm-eval", "--prompt", "prompt_token_ids", "--task", "t"]
    monkeypatch.setattr(sys, "argv", ["eval_logs.py", *command])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    [samples] = (echo_job.folder / "logs" / "rank64").glob("samples_t_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    assert [line["acc"] for line in lines] == [1.0] * 40
    assert lines[0]["filtered_resps"] == [lines[0]["target"]]
    page = write_report(echo_job.store, "2 EUR")
    assert "<h2>Scores</h2>" in page
    assert "rows with another score than base model" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"for_each_adapter": "rank9"}, "for_each_adapter='rank9': no adapter has this name; did you mean 'rank"),
        ({"for_each_adapter": ["rank*", "run-*"]}, "for_each_adapter='run-*'"),
        ({"for_each_adapter": "all", "adapters": None}, "the job has no adapters"),
        ({"include_base": True}, "include_base"),
        ({"score_by": "number"}, "--expected"),
        (
            {"for_each_adapter": "all", "stages": {"a": {"messages": "{{ label }}"}}},
            "stages: a stage names its adapter",
        ),
        ({"for_each_adapter": "all", "expected": "lable"}, "expected='lable': the input has no such column"),
        ({"for_each_adapter": "all", "expected": "parts"}, "expected='parts': the column has type"),
        ({"for_each_adapter": "all", "expected": "label", "drop": "label"}, "drop='label'"),
        ({"for_each_adapter": "all", "expected": "label", "score_by": "luck"}, "score_by='luck'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(echo_job: EchoJob, options: dict[str, Any], said: str) -> None:
    echo_job.write_input([{"id": 1, "prompt_token_ids": [3], "label": "x", "parts": {"a": 1}}])
    with pytest.raises(JobRequestError) as error:
        lorabatch.plan(**echo_job.options(**options))
    assert said in str(error.value)


def test_a_column_of_adapters_and_a_sweep_exclude_each_other(echo_job: EchoJob) -> None:
    echo_job.write_input([{"id": 1, "adapter": "rank1", "prompt_token_ids": [3]}])
    with pytest.raises(JobRequestError, match="each says which adapters answer a row"):
        lorabatch.plan(**echo_job.options(for_each_adapter="rank?"))
    plan = lorabatch.plan(**echo_job.options(for_each_adapter="rank?", columns={"adapter": ""}, output_prefix="a_"))
    assert plan.to_json()["rows"] == 2


@pytest.mark.parametrize(("shape", "samples"), [("long", "rows"), ("wide", "lists")])
@pytest.mark.long
def test_sweeps_are_compared_row_by_row_and_adapter_by_adapter(
    shared_client: Any, echo_job: EchoJob, shape: str, samples: str
) -> None:
    echo_job.write_input([{"id": i, "prompt_token_ids": [3 + i, 4]} for i in range(12)])
    asked = {"for_each_adapter": "all", "include_base": True, "n": 2, "samples": samples}
    echo_job.run(shared_client, **asked, shape=shape)
    shutil.rmtree(echo_job.adapters / "rank8")
    shutil.copytree(echo_job.adapters / "rank1", echo_job.adapters / "rank8")
    other = str(echo_job.folder / "other")
    echo_job.run(shared_client, **asked, output=other)
    first, second = lorabatch.Job(str(echo_job.output)), lorabatch.Job(other)
    found = first.compare_with(second)
    assert (found.num_equal, found.num_different, found.num_alone, found.num_other_adapter) == (96, 24, (0, 0), 0)
    assert {name: part.num_different for name, part in found.adapters.items()} == {
        name: 24 * (name == "rank8") for name in ("", *NAMES, "rank64")
    }
    assert all(one["adapter"] == two["adapter"] == "rank8" for _, one, two in found.examples)
    assert first.compare_with(first).num_equal == 120
    # two adapters of one sweep, and one adapter of each of two
    assert second.compare_with(second, adapters=("rank1", "rank8")).num_equal == 24
    assert first.compare_with(second, adapters=("", "")).num_equal == 24
    assert first.compare_with(second, adapters=("rank8", "rank8")).num_different == 24


@pytest.mark.long
@pytest.mark.parametrize("shape", ["long", "wide"])
def test_rows_of_a_sweep_are_compared_with_float32(
    shared_client: Any, echo_job: EchoJob, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", str(echo_job.folder / "history"))
    rows = [{"id": i, "prompt_token_ids": [3 + i, 4] if i else [3] * 5000, "label": "x"} for i in range(10)]
    echo_job.write_input(rows)
    asked = {"for_each_adapter": "rank[18]*", "include_base": True, "expected": "label", "shape": shape}
    echo_job.run(shared_client, base_quantization="int8", **asked)
    spec = echo_job.record.job_spec()
    found = compare(echo_job.store, spec, 100, client=shared_client, engine_factory=ECHO_FACTORY)
    # the row that is too long has no answer of any of the three
    assert found.num_rows == found.num_equal == 27
    assert lorabatch.status(str(echo_job.output)).headline == "done"


@pytest.mark.parametrize("shape", ["long", pytest.param("wide", marks=pytest.mark.long)])
def test_one_adapter_of_a_sweep_is_exported(shared_client: Any, echo_job: EchoJob, shape: str) -> None:
    echo_job.write_input([{"id": f"r{i}", "prompt_token_ids": [3 + i, 4]} for i in range(5)])
    echo_job.run(shared_client, for_each_adapter=["rank1", "rank8"], include_base=True, shape=shape)
    target = echo_job.folder / "results.jsonl"
    command = ["export", str(echo_job.output), str(target)]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "Choose an adapter with --adapter: '' (base model), 'rank1', 'rank8'." in said
    unknown = CliRunner().invoke(app, [*command, "--adapter", "rank20"])
    assert (unknown.exit_code, target.exists()) == (2, False)
    sha = {adapter.name: adapter.sha256 for adapter in echo_job.record.adapters}
    for name in ("", "rank1", "rank8"):
        done = CliRunner().invoke(app, [*command, "--adapter", name])
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
        texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
        assert texts == {f"r{i}": echo_engine.answer([3 + i, 4], sha.get(name), 4) for i in range(5)}
