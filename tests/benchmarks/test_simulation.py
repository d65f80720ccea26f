from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lorabatch.benchmarks.fidelity_results import Fidelity, FidelityResults
from lorabatch.benchmarks.simulation import dlora_figures, loraserve_figures
from lorabatch.benchmarks.simulation.decisions import PlacementQuality, PlanningScale, scale_row
from lorabatch.benchmarks.simulation.figure import Claim, Figure, Finding, Interval
from lorabatch.benchmarks.simulation.gpu_changes import before_and_after
from lorabatch.benchmarks.simulation.grid import Shape as GridShape
from lorabatch.benchmarks.simulation.grid import bound, ours, parts, settings, table_of_parts
from lorabatch.benchmarks.simulation.grid import draw as draw_instance
from lorabatch.benchmarks.simulation.growing_rows import Shape
from lorabatch.benchmarks.simulation.lengths import Lengths, read_trace, synthetic_lengths
from lorabatch.benchmarks.simulation.offline import Comparison, LoadsAhead, jobs
from lorabatch.benchmarks.simulation.papers import Table
from lorabatch.benchmarks.simulation.report import Results, write_report
from lorabatch.benchmarks.simulation.serving_run import sustained_factor
from lorabatch.benchmarks.simulation.time_left import draw, play, table
from lorabatch.scheduler.simulation.replay import ReplayOutcome

LATENCY, RATE = Claim("ours", "theirs", "3", "s"), Claim("ours", "theirs", "ordering", "per s", higher_is_better=True)


def make_figure(ours=(1.0, 2.0), theirs=(4.0, 2.0)):
    values = {"s": {"ours": list(ours), "theirs": list(theirs)}, "per s": {"ours": [4.0, 6.0], "theirs": [2.0, 5.0]}}
    return Figure("Paper 1", "x", (1.0, 2.0), values, (LATENCY, RATE))


def over_seeds(*theirs, claim=LATENCY):
    return Finding.of([make_figure((1.0, 1.0), of_seed) for of_seed in theirs], claim)


def test_a_ratio_is_of_the_worse_over_the_better():
    assert make_figure().ratios(LATENCY).tolist() == [4.0, 1.0]
    assert make_figure().ratios(RATE).tolist() == [2.0, 1.2]


def test_points_without_an_end_or_near_zero_make_no_ratio():
    assert np.isnan(make_figure(theirs=(float("inf"), 3.0)).ratios(LATENCY)).tolist() == [True, False]
    assert np.isnan(make_figure().ratios(replace(LATENCY, least=1.5))).tolist() == [True, False]
    found = over_seeds((2.0, 2.0), (2.0, 3.0), claim=replace(LATENCY, least=1.5))
    assert (found.verdict, found.points_by_verdict, found.largest) == ("no ratio", "2 no ratio", "-")


def test_a_point_that_one_seed_cannot_compare_is_left_out_of_all():
    found = over_seeds((2.0, 3.0), (2.0, float("inf")))
    assert found.whole is not None
    assert found.whole.mean == pytest.approx(2.0)
    assert found.points_by_verdict == "1 yes, 1 no ratio"


def test_intervals_are_those_of_students_t():
    # Logs 0, 1 and 2: mean 1, standard error 1 / sqrt(3), t of 97.5 % with two degrees of freedom 4.303.
    found = Interval.of(np.exp([0.0, 1.0, 2.0]))
    half = 4.303 / 3**0.5
    assert (found.mean, found.low, found.high) == pytest.approx(tuple(np.exp([1.0, 1 - half, 1 + half])))


@pytest.mark.parametrize(
    ("of_seeds", "verdict"),
    [((1.5, 1.6, 1.7), "yes"), ((0.5, 0.6, 0.5), "no"), ((0.8, 1.3, 1.1), "same"), ((1.0, 1.0, 1.0), "same")],
)
def test_a_verdict_is_where_the_interval_lies(of_seeds, verdict):
    found = over_seeds(*((ratio, ratio) for ratio in of_seeds))
    assert found.verdict == verdict
    assert found.points_by_verdict == f"2 {verdict}"


def test_parity_holds_unless_the_interval_is_below_one():
    parity = replace(LATENCY, is_parity=True)
    assert over_seeds((0.5, 0.5), (0.6, 0.6), (0.5, 0.5), claim=parity).verdict == "no"
    assert over_seeds((0.8, 0.8), (1.3, 1.3), (1.1, 1.1), claim=parity).verdict == "yes"


@pytest.mark.long
def test_the_table_of_the_papers_has_every_claim_and_tuned_choice():
    lengths = Lengths(np.full(8, 20, np.int32), np.full(8, 4, np.int32), "short lengths")
    figures = {}
    for seed in (0, 1):
        for make in (dlora_figures.figure_10_and_14, dlora_figures.figure_12, loraserve_figures.figure_22):
            for figure in make(lengths, 4, seed):
                figures.setdefault(figure.name, []).append(figure)
    table = Table(figures)
    claims, tuned = table.claims()[2:], table.tuned()[2:]
    assert [line.split(" | ")[0] for line in claims] == [
        f"| {name}" for name, of_seeds in figures.items() for _ in of_seeds[0].claims
    ]
    assert all(line.split(" | ")[6] in ("yes", "same", "no", "no ratio") for line in claims)
    assert {line.split(" | ")[1] for line in tuned} == {"dLoRA 10", "LoRAServe 22"}
    assert table.claims() == Table(figures).claims()


def test_the_report_holds_every_result(tmp_path):
    results = Results(
        "made-up lengths",
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
    assert "| a job | 10.0 | 12.0 (1.20) | 50% |" in text
    assert "| a job | 12.0 | 15.0% | 10.0 | 1.0% |" in text
    assert "| a job | 10 | 100 | 200 | 11.0 | 10.0 | +10.0% |" in text
    assert "| a third, lengths unknown | 10 |" in text
    assert "known lengths: 6.5%" in text
    assert "its 111 recorded events give the 17 recorded commands, exactly" in text


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


def test_the_sustained_rate_is_found_between_steps_of_the_bisection():
    assert sustained_factor(lambda factor: (factor / 2.5) ** 2, low=0.5, high=8.0, rounds=3) == pytest.approx(2.5)
    assert sustained_factor(lambda factor: 2.0, low=0.5, high=8.0) == 0.5
    assert sustained_factor(lambda factor: 0.5, low=0.5, high=8.0) == 8.0
    steep = sustained_factor(lambda factor: 0.5 if factor < 2.5 else float("inf"), low=0.5, high=8.0, rounds=12)
    assert steep == pytest.approx(2.5, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "number", "begin"),
    [((7009, 7020), 0, 0.25), ((7013, 7019), 0, 0.25), ((7013, 7019), 1, 0.0)],
    ids=["known", "unknown", "of an earlier job"],
)
def test_the_time_left_is_near_and_mostly_in_its_range(seeds, number, begin):
    """Jobs on CPUs, of which a coordinator sees what it would see of a real one; from a quarter of them on, where
    nothing says how long answers are.
    """
    errors, held = [], []
    for seed in seeds:
        end_s, shown = play(draw(seed)[number])
        moments = [(end_s - at_s, left) for at_s, left in shown if begin * end_s <= at_s < end_s]
        errors += [abs(left.seconds - true_s) / end_s for true_s, left in moments]
        held += [left.least_s <= true_s <= left.most_s for true_s, left in moments]
    assert len(errors) > 20
    assert np.mean(errors) < 0.15
    assert np.mean(held) > 0.6


def test_the_table_of_the_time_left_has_a_line_for_each_part_of_the_job():
    job = draw(7000)[0]
    assert table([(job, *play(job))]).count("\n") == 6


def test_prompts_together_and_growing_rows_leave_fewer_mixed_steps_and_more_rows():
    """A card of little memory, in a job of a few batches."""
    before, after = before_and_after(Shape(40, 600, 100, 0.7, 2048, 4), num_rows=100)
    assert after.mixed_share < before.mixed_share
    assert after.batch_rows > before.batch_rows
    assert after.makespan_s < before.makespan_s


def test_the_parts_of_a_makespan_are_all_of_it_and_the_first_are_the_bound():
    shape = GridShape(1.2, "bimodal", 20, 2, is_equal=True)
    instance = draw_instance(shape, {}, 3, settings(40.0), batches=1.5)
    found = list(parts(instance).values())
    assert sum(found) == pytest.approx(ours(instance))
    assert sum(found[:3]) == pytest.approx(bound(instance).work_s)
    assert min(found) >= -1e-9
    assert table_of_parts([instance])[0] == "| share of the makespan | bimodal (1) |"
