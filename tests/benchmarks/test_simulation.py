from __future__ import annotations

import numpy as np
import pytest

from lorabatch.benchmarks.fidelity_results import Fidelity, FidelityResults
from lorabatch.benchmarks.simulation.decisions import PlacementQuality, PlanningScale, scale_row
from lorabatch.benchmarks.simulation.figure import Claim, Figure
from lorabatch.benchmarks.simulation.lengths import read_trace, synthetic_lengths
from lorabatch.benchmarks.simulation.offline import Comparison, LoadsAhead, jobs
from lorabatch.benchmarks.simulation.report import Results, write_report
from lorabatch.benchmarks.simulation.serving_run import sustained_factor
from lorabatch.scheduler.simulation.replay import ReplayOutcome

LATENCY, RATE = Claim("ours", "theirs", 3.0, "s"), Claim("ours", "theirs", None, "per s", higher_is_better=True)


def make_figure(ours=(1.0, 2.0), theirs=(4.0, 2.0)):
    values = {"s": {"ours": list(ours), "theirs": list(theirs)}, "per s": {"ours": [4.0, 6.0], "theirs": [2.0, 5.0]}}
    return Figure("Paper fig. 1", "A title", "x", (1.0, 2.0), values, (LATENCY, RATE), "A note.")


def test_a_ratio_is_the_largest_over_the_points():
    assert make_figure().ratio(LATENCY) == 4.0
    assert make_figure().ratio(RATE) == 2.0


def test_points_without_an_end_do_not_make_a_ratio():
    assert make_figure(theirs=(float("inf"), 3.0)).ratio(LATENCY) == 1.5


def test_an_ordering_that_fails_somewhere_is_reported():
    assert make_figure().agreement(LATENCY) == "yes"
    assert make_figure(ours=(5.0, 2.0)).agreement(LATENCY) == "on 1 of 2 points"


def test_policies_that_do_the_same_are_not_called_an_agreement():
    assert make_figure(ours=(1.0, 2.0), theirs=(1.01, 1.99)).agreement(LATENCY) == "no difference"


def test_the_report_holds_every_claim_and_picture(tmp_path):
    results = Results(
        "made-up lengths",
        [make_figure()],
        [Comparison("a job", {"planner": 10.0, "S-LoRA": 12.0}, 0.5)],
        100,
        [LoadsAhead("a job", (12.0, 0.15), (10.0, 0.01))],
        PlacementQuality(0.01, 0.001, 0.015, 0.2),
        (5.0, 9.0),
        PlanningScale(2.9, 1.0, 150_000_000, 0.004, 1593),
        [scale_row(2_000, 5, 2)],
        FidelityResults(
            "made-up.json",
            "a machine",
            {"decode": {"r_squared": 0.9, "median_error": 0.05}},
            [
                Fidelity("a job", 10, 100, 200, 11.0, 10.0),
                Fidelity("another", 10, 100, 200, 9.7, 10.0),
                Fidelity("a third", 10, 100, 200, 20.0, 10.0, has_lengths=False),
            ],
        ),
        "the command",
        ReplayOutcome(111, 17),
    )
    page = write_report(results, tmp_path)
    text = page.read_text()
    assert "| Paper fig. 1 | ours | theirs | s | up to 3 | 4.00 | yes |" in text
    assert "| a job | 10.0 | 12.0 (1.20) | 50% |" in text
    assert "| a job | 12.0 | 15.0% | 10.0 | 1.0% |" in text
    assert "| a job | 10 | 100 | 200 | 11.0 | 10.0 | +10.0% |" in text
    assert "| a third, lengths unknown | 10 |" in text
    assert "known lengths: 6.5%" in text
    assert "its 111 recorded events give the 17 recorded commands, exactly" in text
    assert sorted(picture.name for picture in page.with_suffix("").iterdir()) == [
        "paper-fig-1-0.png",
        "paper-fig-1-1.png",
    ]


def test_the_newest_fidelity_results_are_read_back():
    found = FidelityResults.newest()
    assert found is not None
    assert len(found.jobs) >= 5
    assert found.mean_error == pytest.approx(np.mean([abs(job.error) for job in found.jobs if job.has_lengths]))


def test_a_trace_is_read_by_its_column_names(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,374,44\n2023,396,109\n")
    lengths = read_trace(path)
    assert lengths.prompt_tokens.tolist() == [374, 396]
    prompt, output = lengths.draw(np.random.default_rng(0), 50, scale=0.5)
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(187, 22), (198, 54)}


def test_the_jobs_differ_and_are_sound():
    made = jobs(synthetic_lengths(), 50, seed=0)
    for job in made:
        job.workload.check_integrity()
    assert [len(job.workload.adapters) for job in made] == [1, 2, 8, 50, 200, 200]


def test_the_sustained_rate_is_found_by_bisection():
    assert sustained_factor(lambda factor: factor <= 2.5, low=0.5, high=8.0, rounds=12) == pytest.approx(2.5, rel=0.01)
    assert sustained_factor(lambda factor: False, low=0.5, high=8.0) == 0.5
