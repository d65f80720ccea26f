"""The time left: the plan's at first, then corrected by costs, paces and lengths, and surer the more is known."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.time_left import PlannedJob, TimeLeft, Work

WHOLE = Work(100, 1000, 5000, 5000, num_steps=200)
JOB = PlannedJob(120.0, WHOLE, CPU_SMOLLM2_135M, num_replicas=2, is_guess=True)
NOTHING = Work()


def half_of(work: Work) -> Work:
    return Work(*(value / 2 for value in astuple(work)))


def test_before_its_first_step_a_job_takes_what_the_plan_says() -> None:
    found = JOB.time_left(WHOLE, NOTHING, 0.0, [], None)
    assert found.seconds == pytest.approx(120.0)
    assert found.least_s < 90 < 180 < found.most_s


def test_a_slower_machine_and_a_missing_worker_make_it_longer() -> None:
    measured = CPU_SMOLLM2_135M.scaled(3.0)
    assert JOB.time_left(WHOLE, NOTHING, 0.0, [1.0, 1.0], measured).seconds == pytest.approx(360.0)
    # One of two is four times slower than the other: together 1.25 instead of 2.
    assert JOB.time_left(WHOLE, NOTHING, 0.0, [1.0, 4.0], None).seconds == pytest.approx(120 * 2 / 1.25)
    # One that is still to come counts as one.
    assert JOB.time_left(WHOLE, NOTHING, 0.0, [1.0], None).seconds == pytest.approx(120.0)


def test_longer_answers_than_planned_make_it_longer() -> None:
    longer = replace(WHOLE, output_tokens=10_000, guessed_tokens=0, num_steps=400)
    assert 200 < JOB.time_left(longer, NOTHING, 0.0, [1.0, 1.0], None).seconds < 240


def test_the_pace_so_far_counts_the_more_the_further_the_job_is() -> None:
    done = half_of(WHOLE)
    # Half of the work took 90 s, of which the plan knew 60.
    assert JOB.time_left(done, done, 90.0, [1.0, 1.0], None).seconds == pytest.approx((60 + 90) / 2)
    late, early = (Work(*(share * value for value in astuple(WHOLE))) for share in (0.05, 0.95))
    found = JOB.time_left(late, early, 171.0, [1.0, 1.0], None)
    assert found.seconds == pytest.approx(0.95 * 9.0 + 0.05 * 6.0)


def test_the_last_rows_take_their_steps_however_few_they_are() -> None:
    last = Work(1, 0, 350, 0, num_steps=350)
    found = JOB.time_left(last, Work(99, 1000, 4650, 0, num_steps=190), 110.0, [1.0, 1.0], None)
    assert found.seconds > 350 * CPU_SMOLLM2_135M.step_s


def test_how_workers_end_is_as_uncertain_when_little_is_left() -> None:
    known = replace(WHOLE, guessed_tokens=0)
    early = JOB.time_left(known, NOTHING, 0.0, [1.0, 1.0], CPU_SMOLLM2_135M)
    late, before = (Work(*(share * value for value in astuple(known))) for share in (0.02, 0.98))
    found = JOB.time_left(late, before, 117.6, [1.0, 1.0], CPU_SMOLLM2_135M)
    assert found.most_s - found.seconds > 0.4 * (early.most_s - early.seconds)
    assert found.least_s == 0.0


def test_what_is_known_makes_the_range_narrower() -> None:
    def width(found: TimeLeft) -> float:
        return found.most_s / found.least_s

    known = replace(WHOLE, guessed_tokens=0)
    widths = [
        width(JOB.time_left(WHOLE, NOTHING, 0.0, [], None)),
        width(JOB.time_left(known, NOTHING, 0.0, [], None)),
        width(replace(JOB, is_guess=False).time_left(known, NOTHING, 0.0, [], None)),
        width(JOB.time_left(known, NOTHING, 0.0, [1.0, 1.0], CPU_SMOLLM2_135M)),
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 * widths[-1]


def test_nothing_is_left_of_a_job_that_is_done_or_has_no_rows_for_engines() -> None:
    assert JOB.time_left(NOTHING, WHOLE, 100.0, [1.0], None) == TimeLeft(0.0, 0.0, 0.0)
    empty = replace(JOB, work=NOTHING, predicted_s=0.0)
    assert empty.time_left(NOTHING, NOTHING, 0.0, [], None) == TimeLeft(0.0, 0.0, 0.0)
