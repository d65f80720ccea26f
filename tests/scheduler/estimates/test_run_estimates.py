"""Estimates of a running job: the work that is left is that of rows without a result, corrected by what was reported.

The scheduler's events are the only source, so that a replayed log gives the same time left.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.estimates.lengths import AnswerLengths, LengthEstimator
from lorabatch.scheduler.estimates.run_estimates import RunEstimates
from lorabatch.scheduler.estimates.time_left import PlannedJob, TimeLeft, Work
from lorabatch.scheduler.estimates.work_left import WorkLeft
from lorabatch.scheduler.messages import (
    Event,
    FinishedRows,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    RunShard,
    ShardCommitted,
    StepTotals,
)
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.scheduler import Scheduler
from lorabatch.scheduler.settings import SchedulerSettings
from lorabatch.tests.scheduler.unfinished import unfinished

NOTHING = Work()
EARLIER = {"a": AnswerLengths.of([(40, 40, False)])}


def make_shard(shard_id: int, num_rows: int = 10) -> Shard:
    return Shard(shard_id, 0, "unmerged", ("a",), num_rows, prompt_tokens=10, predicted_output_tokens=10)


class Account:
    """The work left of some shards, and the lengths that it is told of."""

    def __init__(self, shards: list[Shard], known_lengths: dict[str, AnswerLengths] | None) -> None:
        self.lengths = LengthEstimator()
        self.work = WorkLeft(shards, known_lengths, self.lengths)
        self.now = self.work.now


SHARDS = [make_shard(i) for i in range(3)]


def test_work_is_left_for_rows_without_an_answer_less_what_running_ones_have() -> None:
    # Three shards of ten rows, each row of one prompt token and two to generate at most.
    job = Account(SHARDS, {})
    left = job.now(8, NOTHING)
    assert (left.num_rows, left.prompt_tokens, left.guessed_tokens) == (30, 30, left.output_tokens)
    assert left.output_tokens == pytest.approx(30, rel=0.2)
    running = {"opened": [(SHARDS[0], 5)], "num_running": 4, "running_tokens": 2}
    left = job.now(8, Work(prompt_tokens=9), **running)
    assert (left.num_rows, left.prompt_tokens) == pytest.approx((25, 21))
    # Rows may run whose prompts are not computed yet; those that wait have computed nothing.
    assert job.now(8, Work(prompt_tokens=6), **running).prompt_tokens == 24
    assert job.now(8, Work(prompt_tokens=30), **running).prompt_tokens == pytest.approx(21)
    # What runs is not nearly done before lengths are known.
    assert left.output_tokens >= 21 + 4 * 0.5
    job.work.committed(SHARDS[1])
    assert job.now(8, NOTHING, **running).num_rows == 15


def test_answers_that_have_finished_say_how_long_others_are() -> None:
    job = Account(SHARDS, {})
    job.lengths.finished(1000, 200, "a")
    left = job.now(8, NOTHING)
    assert left.output_tokens == pytest.approx(150, rel=0.1)
    assert left.guessed_tokens < 2
    # Thirty rows in eight places: about four times as many steps as a row has, not one for each token.
    assert 15 < left.num_steps < 30


@pytest.mark.parametrize("known_lengths", [{}, EARLIER, None], ids=["unknown", "of earlier jobs", "exact"])
def test_rows_that_are_expected_to_have_empty_answers_are_work_too(
    known_lengths: dict[str, AnswerLengths] | None,
) -> None:
    shard = replace(make_shard(0), prompt_tokens=0, predicted_output_tokens=0, longest_output_tokens=0)
    job = Account([shard], known_lengths)
    assert job.now(8, NOTHING).output_tokens >= 5
    job.lengths.finished(0, 6, "a")
    left = job.now(8, NOTHING, [(shard, 4)])
    assert left.num_rows == 4
    assert left.output_tokens > 0


def test_lengths_that_are_known_stay_what_they_are() -> None:
    exact = Account([make_shard(0)], None)
    exact.lengths.finished(100, 20, "a")
    assert (exact.now(8, NOTHING).output_tokens, exact.now(8, NOTHING).guessed_tokens) == (10, 0)
    earlier = Account([make_shard(0)], EARLIER)
    assert (earlier.now(8, NOTHING).output_tokens, earlier.now(8, NOTHING).guessed_tokens) == (10, 0)


def test_known_lengths_less_what_was_generated_are_left() -> None:
    """The longest rows begin first: rows without a result are not as long as all are on average."""
    shard = replace(make_shard(0), predicted_output_tokens=1000, longest_output_tokens=400)
    job = Account([shard], None)
    job.lengths.finished(700, 4, "a")
    assert job.now(2, NOTHING, [(shard, 6)], 2, 60).output_tokens == 240
    # Rows that an earlier run answered are not reported; they count with the mean.
    assert Account([shard], None).now(2, NOTHING, [(shard, 6)], 2, 60).output_tokens == 540


def test_adapters_with_longer_answers_have_more_left() -> None:
    shards = [replace(make_shard(i), adapters=(name,), predicted_output_tokens=1000) for i, name in enumerate("ab")]
    job = Account(shards, {})
    job.lengths.finished(500, 50, "a")
    job.lengths.finished(4500, 50, "b")
    both = job.now(8, NOTHING).output_tokens
    job.work.committed(shards[1])
    assert job.now(8, NOTHING).output_tokens < 0.15 * both


def test_rows_that_run_on_while_others_have_finished_are_long_ones() -> None:
    shard = replace(make_shard(0, 20), predicted_output_tokens=10_000)
    job = Account([shard], {})
    job.lengths.finished(200, 10, "a")
    before = job.now(8, NOTHING, [(shard, 10)])
    after = job.now(8, NOTHING, [(shard, 10)], num_running=8, running_tokens=8 * 300)
    assert after.output_tokens > 2 * before.output_tokens


def test_the_longest_row_counts_where_lengths_are_known() -> None:
    shard = replace(make_shard(0, 2), predicted_output_tokens=100, longest_output_tokens=90)
    job = Account([shard], None)
    # One of two rows is longer than this with an even chance.
    assert 60 < job.now(8, NOTHING).num_steps <= 90
    assert job.now(8, NOTHING, [(shard, 2)], 2, 160).num_steps <= 10


PLANNED = PlannedJob(60.0, Work(30, 3000, 3000, 3000, 300), CPU_SMOLLM2_135M, 2, is_guess=True, num_places=16)
TOTALS = StepTotals(num_steps=40, prefill_tokens=400, decode_rows=300)


def progress(time_s: float, replica: str, steps: float = 0.0, **facts: object) -> ReplicaReported:
    """A report after `steps` times the steps of `TOTALS`."""
    return ReplicaReported(
        time_s,
        replica,
        open_rows=0,
        running_rows=0,
        tokens_per_s=0.0,
        resident_adapters=(),
        engine_s=3.0 * steps,
        steps=StepTotals(*(steps * value for value in TOTALS.values)),  # type: ignore[arg-type]
        **facts,  # type: ignore[arg-type]
    )


def test_prompt_tokens_that_engines_reuse_are_passed_without_being_computed() -> None:
    def seconds_left(reused_share: float) -> float:
        shards = [replace(shard, prompt_tokens=1000) for shard in SHARDS]
        estimates = RunEstimates(shards, shards, CPU_SMOLLM2_135M, replace(PLANNED, is_guess=False))
        for steps in (0.0, 1.0, 2.0):
            estimates.reported(replace(progress(steps, "a", steps, reused_share=reused_share), running_rows=30))
        left = estimates.time_left(4.0, [(shards[0], 10)], 16)
        assert left is not None
        return left.seconds

    assert seconds_left(0.6) < seconds_left(0.0)


def events() -> list[Event]:
    """Two replicas, one half as fast, one of them gone later; a part is written."""
    shard, finished = unfinished((0, 4)), (FinishedRows("a", 2, 30),)
    return [
        ReplicaJoined(1.0, "a", 8),
        ReplicaJoined(1.0, "b", 8),
        *(progress(second, "a", second, open_shards=shard, finished=finished) for second in (2.0, 3.0, 4.0)),
        *(progress(second, "b", second / 2) for second in (2.0, 4.0)),
        ShardCommitted(5.0, 0, "a"),
        ReplicaLeft(6.0, "b"),
        progress(7.0, "a", 6.0),
    ]


def test_the_time_left_of_a_run_replays_from_its_events() -> None:
    settings = SchedulerSettings(
        expected_replicas=2, cost=CPU_SMOLLM2_135M, planned=replace(PLANNED, known_lengths=EARLIER)
    )
    live = Scheduler([make_shard(i, 100) for i in range(3)], settings=settings)
    written = json.loads(json.dumps(live.beginning()))
    again = Scheduler([make_shard(i, 100) for i in range(3)], settings=SchedulerSettings.from_json(written["settings"]))
    shown: list[TimeLeft | None] = []
    for event in events():
        live.handle(event)
        again.handle(Event.from_json(json.loads(json.dumps(event.to_json()))))
        shown.append(live.time_left(event.time_s))
        assert shown[-1] == again.time_left(event.time_s), f"after {event}"
        assert live.rows_left == again.rows_left
    assert all(left is not None and left.least_s < left.seconds < left.most_s for left in shown)
    assert live.estimates.corrected_s == again.estimates.corrected_s
    assert live.estimates.corrected_s is not None
    assert live.rows_left == 200


def test_rows_are_left_until_their_results_are_reported_or_their_part_is_written() -> None:
    scheduler = Scheduler([make_shard(i) for i in range(3)], committed=[2])
    assert scheduler.rows_left == 20
    opened = [c.shard_id for c in scheduler.handle(ReplicaJoined(0.0, "a", 8)) if isinstance(c, RunShard)]
    assert opened == [0, 1]
    scheduler.handle(progress(1.0, "a", open_shards=unfinished((0, 4), (1, 10))))
    assert scheduler.rows_left == 14
    scheduler.handle(ShardCommitted(2.0, 0, "a"))
    assert scheduler.rows_left == 10
    scheduler.handle(ReplicaLeft(3.0, "a"))
    assert scheduler.rows_left == 10


def test_a_scheduler_without_a_prediction_says_no_time() -> None:
    assert Scheduler([make_shard(0)]).time_left(1.0) is None
