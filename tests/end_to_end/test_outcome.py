"""The outcome of real jobs of echo engines, as `summary.json`, `status` and the report show it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from distributed import Client
from echo_job import EchoJob, make_rows

from lorabatch.console.progress import status_lines
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.status.job_status import read_status

NOTE = re.compile(r"([0-9,]+) answers were cut off at ([0-9]+)(?: to ([0-9]+))? tokens")


def summary_of(job: EchoJob) -> dict[str, Any]:
    return json.loads((job.output / "_lorabatch" / "summary.json").read_text())  # type: ignore[no-any-return]


def test_a_summary_says_of_each_adapter_what_came_out(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(60)
    for row in rows[4:12:4]:
        row["adapter"] = "nobody"
    rows[8]["prompt_token_ids"] = []
    echo_job.write_input(rows)
    result = echo_job.run(shared_client)
    found = summary_of(echo_job)
    by_name = {count["adapter"]: count for count in found["adapters"]}
    # Echo engines end every answer at max_tokens.
    rank8 = by_name["rank8"]
    assert rank8["finish_reasons"] == {"length": 15}
    assert (rank8["num_cut"], rank8["cut_at"]) == (15, [4, 4])
    assert rank8["answer_tokens"] == {"shortest": 4, "mean": 4.0, "median": 4.0, "p95": 4.0, "longest": 4}
    assert rank8["prompt_tokens"] == 30
    assert rank8["engine_s"] > 0
    assert by_name["nobody"]["errors"] == {"adapter": 1, "prompt": 1}
    assert by_name["nobody"]["examples"] == []
    answers = {row["id"]: row["completion"] for row in echo_job.rows()}
    assert len(rank8["examples"]) == 3
    for example in rank8["examples"]:
        assert example["answer"] == answers[example["id"]]
        assert example["finish_reason"] == "length"
        assert example["prompt_end"]
    # Figures of adapters add up to the job's.
    for name in ("num_rows", "num_errors", "prompt_tokens", "completion_tokens", "rows_per_s", "prompt_tokens_per_s"):
        assert sum(count[name] for count in found["adapters"]) == pytest.approx(found[name])
    assert found["rows_per_s"] == pytest.approx(60 / found["working_s"])
    assert sum(found["phases_s"].values()) == pytest.approx(found["seconds"], abs=0.05)
    assert list(found["phases_s"]) == [
        *("opening", "starting", "indexing", "planning", "loading engines", "answering", "finishing"),
    ]
    assert found["phases_s"]["answering"] == pytest.approx(found["working_s"], abs=0.001)
    assert {kind["kind"]: kind["num_rows"] for kind in found["errors"]} == {"adapter": 1, "prompt": 1}
    lines = status_lines(read_status(echo_job.store))
    for text in (*result.to_text().splitlines()[1:3], "58 answers were cut off at 4 tokens"):
        assert any(text in line for line in lines)
    page = write_report(echo_job.store, gpu_hour_price=3.6)
    assert "58 answers were cut off at 4 tokens" in page


@pytest.mark.parametrize(
    ("options", "limits", "cut"),
    [
        pytest.param({"max_tokens": 3}, None, (8, 3, 3), marks=pytest.mark.long),
        # rows with limits of their own
        pytest.param({"row_settings": ["max_tokens"]}, [2, 9], (8, 2, 9), marks=pytest.mark.long),
        # answers of this length are asked for
        ({"ignore_eos": True}, None, None),
    ],
    ids=["job", "rows", "asked"],
)
def test_cut_answers_are_told_apart_from_those_of_the_length_that_was_asked_for(
    echo_job: EchoJob,
    shared_client: Client,
    options: dict[str, Any],
    limits: list[int] | None,
    cut: tuple[int, int, int] | None,
) -> None:
    rows = make_rows(8)
    for place, row in enumerate(rows):
        if limits:
            row["max_tokens"] = limits[place % 2]
    echo_job.write_input(rows)
    text = echo_job.run(shared_client, **options).to_text()
    found = NOTE.search(text)
    assert bool(found) == bool(cut)
    if found and cut:
        assert (int(found[1]), int(found[2]), int(found[3] or found[2])) == cut


@pytest.mark.long
def test_examples_are_left_out_where_none_are_wanted(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(8)
    echo_job.write_input(rows)
    text = echo_job.run(shared_client, examples=False).to_text()
    (answers := {row["completion"] for row in echo_job.rows()})
    everything = text + json.dumps(summary_of(echo_job)) + write_report(echo_job.store)
    everything += "\n".join(status_lines(read_status(echo_job.store)))
    assert all(count["examples"] == [] for count in summary_of(echo_job)["adapters"])
    assert not any(answer in everything for answer in answers)


@pytest.mark.long
def test_errors_of_a_repaired_adapter_are_errors_no_more(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(16, names=("rank8", "late"))
    echo_job.write_input(rows)
    first = echo_job.run(shared_client, max_errors="60%")
    assert [(kind.kind, kind.num_rows) for kind in first.errors] == [("adapter", 8)]
    (echo_job.adapters / "rank8").rename(echo_job.adapters / "late")
    second = echo_job.run(shared_client, max_errors="60%")
    assert {count.adapter: count.num_errors for count in second.adapters} == {"late": 0, "rank8": 8}
    assert [(kind.kind, kind.num_rows) for kind in second.errors] == [("adapter", 8)]
    assert "'rank8'" in second.errors[0].sentence


def test_status_says_that_compiled_kernels_are_missing(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.cluster.devices.lacks_compiled_kernels", lambda: True)
    echo_job.write_input(make_rows(8))
    echo_job.run(shared_client, device="cpu")
    lines = status_lines(read_status(echo_job.store))
    assert sum("no compiled kernels" in line for line in lines) == 1
