from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lorabatch.console.tables import print_simulation
from lorabatch.jobs.errors import JobRequestError
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.pipeline.planning.simulate import (
    SimulationRequest,
    make_job,
    read_trace_lengths,
    simulate_job,
)
from lorabatch.scheduler.estimates.lengths import AnswerLengths
from lorabatch.scheduler.simulation.synthetic import make_adapters, make_workload

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"t,{100 + i},{10 + i}\n" for i in range(50))


def request(folder: Path, **changes: object) -> SimulationRequest:
    """A small job of log-normal lengths on two workers."""
    values = {
        "job_file": None,
        "trace": None,
        "rows": 60,
        "adapters": 4,
        "skew": 1.0,
        "workers": 2,
        "policies": ("planner", "s-lora"),
        "cost_model": "h200-llama-3-8b",
        "batch_rows": 8,
        "seed": 0,
        "output": folder / "out",
    }
    return SimulationRequest(**values | changes)  # type: ignore[arg-type]


@pytest.mark.long
def test_policies_are_compared_in_a_table_a_file_and_two_pictures(tmp_path: Path) -> None:
    console = Console(width=140, record=True)
    print_simulation(simulate_job(request(tmp_path)), console)
    text = console.export_text()
    assert "planner" in text
    assert "s-lora" in text
    written = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert written["policies"].keys() == {"planner", "s-lora"}
    for name in ("makespan.png", "rows-over-time.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_seconds(tmp_path: Path) -> None:
    first, second = (simulate_job(request(tmp_path, seed=3)).runs for _ in range(2))
    assert [run.metrics for run in first] == [run.metrics for run in second]


def test_answers_of_a_job_are_as_long_on_average_as_its_plan_expects() -> None:
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=8)
    adapter_index, max_tokens = np.arange(4000, dtype=np.int32) % 2 - 1, np.full(4000, 100, np.int32)
    rows = make_workload(make_adapters([8]), adapter_index, np.full(4000, 9, np.int32), max_tokens)
    base, adapter = rows.adapter_index < 0, rows.adapter_index >= 0
    drawn = prediction.with_answers(settings, rows).output_tokens
    assert (drawn.min(), drawn.max()) == (1, 100)
    assert drawn.mean() == pytest.approx(50, rel=0.05)
    learned = replace(settings, lengths={(rows.adapters[0].adapter_id, 0): AnswerLengths.of([(1000, 80_000, False)])})
    drawn = prediction.with_answers(learned, rows).output_tokens
    assert drawn[adapter].mean() == pytest.approx(80, rel=0.05)
    assert drawn[base].mean() == pytest.approx(50, rel=0.05)
    all_of_it = prediction.with_answers(replace(settings, length_share=1.0), rows)
    assert set(all_of_it.output_tokens) == {100}
    fixed = replace(rows, fixed_tokens=np.where(base, 7, 0).astype(np.int32))
    assert set(prediction.with_answers(settings, fixed).output_tokens[base]) == {7}


@pytest.mark.long
def test_slower_workers_take_every_policy_longer_and_are_named_in_the_table(tmp_path: Path) -> None:
    alike, slowed = (simulate_job(request(tmp_path, rows=200, speeds=speeds)) for speeds in (None, "1,0.5"))
    for before, after in zip(alike.runs, slowed.runs, strict=True):
        assert after.metrics.makespan_s > 1.1 * before.metrics.makespan_s
    console = Console(width=140, record=True)
    print_simulation(slowed, console)
    assert "1,0.5 times as fast as the cost model says" in " ".join(console.export_text().split())


def test_lengths_come_from_a_trace_in_pairs(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    found, _ = make_job(request(tmp_path, trace=tmp_path / "trace.csv", adapters=0))
    assert found.output_tokens is not None
    assert (found.prompt_tokens - found.output_tokens == 90).all()
    assert (found.adapter_index == -1).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"speeds": "1,2,3"}, "speeds: 3 given for 2 workers"),
        ({"speeds": "quick"}, "speeds='quick': expected a number above 0"),
        ({"policies": ("magic",)}, "policy='magic': expected one of planner"),
        ({"cost_model": "abacus"}, "neither a file nor a known machine. Machines: cpu-smollm2-135m"),
        ({"trace": Path("/nowhere.csv")}, "trace='/nowhere.csv': cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(JobRequestError, match=expected):
        simulate_job(request(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_lengths_are_read_in_pairs_and_are_at_least_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,396,0\n")
    prompt, output = read_trace_lengths(path)
    assert (prompt.tolist(), output.tolist()) == ([374, 396], [44, 1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "no column ContextTokens and no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("ContextTokens,GeneratedTokens\n1,2\n3,many\n", "line 3 holds no number"),
        ("ContextTokens,GeneratedTokens\n1\n", "line 2 holds no number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(JobRequestError, match=expected):
        read_trace_lengths(tmp_path / "trace.csv")
