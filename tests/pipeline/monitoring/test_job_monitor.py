"""What is known of a running job: rows counted once, wherever they are.

How full batches were: from a worker's first rows on, over all workers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.jobs.record import JobState
from lorabatch.pipeline.messages import FinishedRows, PromptReuse, ShardOutcome, WorkerReport
from lorabatch.pipeline.monitoring.job_monitor import BatchFill, JobMonitor
from lorabatch.scheduler.estimates.lengths import AnswerLengths
from lorabatch.scheduler.estimates.time_left import TimeLeft, Work
from lorabatch.scheduler.planning.waves import Shard


def make_shard(shard_id: int, num_rows: int) -> Shard:
    return Shard(shard_id, 0, "unmerged", ("a",), num_rows, prompt_tokens=10, predicted_output_tokens=10)


def make_report(worker: str, open_shards: tuple[tuple[int, int], ...], **facts: object) -> WorkerReport:
    return WorkerReport(worker, "ready", batch_rows=8, open_shards=open_shards, **facts)  # type: ignore[arg-type]


@pytest.fixture
def monitor() -> JobMonitor:
    return JobMonitor([make_shard(i, 10) for i in range(4)], {3: 10}, {"sha-a": "a"})


def test_rows_of_parts_that_were_there_before_count_as_done(monitor: JobMonitor) -> None:
    state = monitor.state(1.0)
    assert (state.rows, state.rows_done, state.shards, state.shards_done) == (40, 10, 4, 1)


def test_finished_rows_of_open_shards_count_and_are_not_counted_again_when_committed(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", ((0, 4),)))
    assert monitor.state(1.0).rows_done == 16
    monitor.committed(ShardOutcome(0, "w1", 10, num_errors=1, num_reused=0, prompt_tokens=5, completion_tokens=7))
    state = monitor.state(2.0)
    assert (state.rows_done, state.rows_error, state.shards_done, state.completion_tokens) == (20, 1, 2, 7)


def test_engines_load_until_one_is_ready(monitor: JobMonitor) -> None:
    assert monitor.state(1.0).phase == "loading engines"
    monitor.reported(replace(make_report("w1", ()), state="starting"))
    assert monitor.state(1.0).phase == "loading engines"
    monitor.reported(make_report("w2", ()))
    assert monitor.state(1.0).phase == "running"


def test_seconds_without_a_row_or_a_token_are_counted_and_then_no_time_is_left(monitor: JobMonitor) -> None:
    left = TimeLeft(15.0, 10.0, 20.0)
    monitor.reported(make_report("w1", ((0, 10),), tokens_per_s=5.0))
    assert monitor.state(100.0, left).still_s == 0.0
    monitor.reported(make_report("w1", ((0, 10),), prompt_tokens_per_s=5.0))
    assert monitor.state(140.0, left).still_s == 0.0
    monitor.reported(make_report("w1", ((0, 10),)))
    assert monitor.state(155.0, left).time_left == "about 0:15 left (0:10 to 0:20)"
    still = monitor.state(170.0, left)
    assert (still.still_s, still.time_left) == (30.0, "")
    monitor.reported(make_report("w1", ((0, 9),)))
    assert monitor.state(180.0, left).still_s == 0.0


def test_a_lost_worker_is_not_shown(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", ((0, 4),)))
    monitor.lost("w1")
    assert monitor.state(1.0).workers == ()


def test_work_is_left_for_rows_without_an_answer_less_what_running_ones_have(monitor: JobMonitor) -> None:
    # Three shards of ten rows, each row of one prompt token and two to generate at most.
    left = monitor.work_left(8)
    assert (left.num_rows, left.prompt_tokens, left.guessed_tokens) == (30, 30, left.output_tokens)
    assert left.output_tokens == pytest.approx(30, rel=0.2)
    telemetry = EngineTelemetry(num_running=4, running_tokens=2)
    monitor.reported(make_report("w1", ((0, 5),), telemetry=telemetry))
    left = monitor.work_left(8, Work(prompt_tokens=9))
    assert (left.num_rows, left.prompt_tokens) == pytest.approx((25, 21))
    # Rows may run whose prompts are not computed yet; those that wait have computed nothing.
    assert monitor.work_left(8, Work(prompt_tokens=6)).prompt_tokens == 24
    assert monitor.work_left(8, Work(prompt_tokens=30)).prompt_tokens == pytest.approx(21)
    # What runs is not nearly done before lengths are known.
    assert left.output_tokens >= 21 + 4 * 0.5
    monitor.committed(monitor.unknown_outcome(1, "w1"))
    assert monitor.work_left(8).num_rows == 15
    monitor.committed(monitor.unknown_outcome(1, "w1"))
    assert monitor.work_left(8).num_rows == 15


def test_answers_that_have_finished_say_how_long_others_are(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", (), finished=(FinishedRows("sha-a", 200, 1000),)))
    left = monitor.work_left(8)
    assert left.output_tokens == pytest.approx(150, rel=0.1)
    assert left.guessed_tokens < 2
    # Thirty rows in eight places: about four times as many steps as a row has, not one for each token.
    assert 15 < left.num_steps < 30


EARLIER = {"a": AnswerLengths.of([(40, 40, False)])}


@pytest.mark.parametrize("known_lengths", [{}, EARLIER, None], ids=["unknown", "of earlier jobs", "exact"])
def test_rows_that_are_expected_to_have_empty_answers_are_work_too(
    known_lengths: dict[str, AnswerLengths] | None,
) -> None:
    shard = replace(make_shard(0, 10), prompt_tokens=0, predicted_output_tokens=0, longest_output_tokens=0)
    monitor = JobMonitor([shard], {}, {"sha-a": "a"}, known_lengths=known_lengths)
    assert monitor.work_left(8).output_tokens >= 5
    monitor.reported(make_report("w1", ((0, 4),), finished=(FinishedRows("sha-a", 6, 0),)))
    left = monitor.work_left(8)
    assert left.num_rows == 4
    assert left.output_tokens > 0


def test_lengths_that_are_known_stay_what_they_are() -> None:
    exact = JobMonitor([make_shard(0, 10)], {}, {"sha-a": "a"}, known_lengths=None)
    exact.reported(make_report("w1", (), finished=(FinishedRows("sha-a", 20, 100),)))
    assert (exact.work_left(8).output_tokens, exact.work_left(8).guessed_tokens) == (10, 0)
    earlier = JobMonitor([make_shard(0, 10)], {}, {"sha-a": "a"}, known_lengths=EARLIER)
    assert (earlier.work_left(8).output_tokens, earlier.work_left(8).guessed_tokens) == (10, 0)


def test_prompt_tokens_that_engines_reuse_are_passed_without_being_computed(monitor: JobMonitor) -> None:
    assert monitor.reused_share == 0.0
    monitor.reported(make_report("w1", (), telemetry=EngineTelemetry(prompt_tokens=10, reused_prompt_tokens=30)))
    monitor.reported(make_report("w2", (), telemetry=EngineTelemetry(prompt_tokens=30, reused_prompt_tokens=10)))
    assert monitor.reused_share == 0.5


def test_known_lengths_less_what_was_generated_are_left() -> None:
    """The longest rows begin first: rows without a result are not as long as all are on average."""
    shard = replace(make_shard(0, 10), predicted_output_tokens=1000, longest_output_tokens=400)
    monitor = JobMonitor([shard], {}, {"sha-a": "a"}, known_lengths=None)
    finished = (FinishedRows("sha-a", 4, 700),)
    running = EngineTelemetry(num_running=2, running_tokens=60)
    monitor.reported(make_report("w1", ((0, 6),), finished=finished, telemetry=running))
    assert monitor.work_left(2).output_tokens == 240
    # Rows that an earlier run answered are not reported; they count with the mean.
    resumed = JobMonitor([shard], {}, {"sha-a": "a"}, known_lengths=None)
    resumed.reported(make_report("w1", ((0, 6),), telemetry=running))
    assert resumed.work_left(2).output_tokens == 540


def test_adapters_with_longer_answers_have_more_left() -> None:
    shards = [replace(make_shard(i, 10), adapters=(name,), predicted_output_tokens=1000) for i, name in enumerate("ab")]
    monitor = JobMonitor(shards, {}, {"sha-a": "a", "sha-b": "b"})
    finished = (FinishedRows("sha-a", 50, 500), FinishedRows("sha-b", 50, 4500))
    monitor.reported(make_report("w1", (), finished=finished))
    both = monitor.work_left(8).output_tokens
    monitor.committed(monitor.unknown_outcome(1, "w1"))
    assert monitor.work_left(8).output_tokens < 0.15 * both


def test_rows_that_run_on_while_others_have_finished_are_long_ones(monitor: JobMonitor) -> None:
    shard = replace(make_shard(0, 20), predicted_output_tokens=10_000)
    monitor = JobMonitor([shard], {}, {"sha-a": "a"})
    finished = (FinishedRows("sha-a", 10, 200),)
    monitor.reported(make_report("w1", ((0, 10),), finished=finished))
    before = monitor.work_left(8)
    running = EngineTelemetry(num_running=8, running_tokens=8 * 300)
    monitor.reported(make_report("w1", ((0, 10),), telemetry=running))
    after = monitor.work_left(8)
    assert after.output_tokens > 2 * before.output_tokens


def test_the_longest_row_counts_where_lengths_are_known() -> None:
    shard = replace(make_shard(0, 2), predicted_output_tokens=100, longest_output_tokens=90)
    monitor = JobMonitor([shard], {}, {"sha-a": "a"}, known_lengths=None)
    # One of two rows is longer than this with an even chance.
    assert 60 < monitor.work_left(8).num_steps <= 90
    monitor.reported(make_report("w1", ((0, 2),), telemetry=EngineTelemetry(num_running=2, running_tokens=160)))
    assert monitor.work_left(8).num_steps <= 10


def test_the_time_left_and_its_range_are_part_of_the_state(monitor: JobMonitor) -> None:
    assert monitor.state(0.0).eta_s is None
    state = monitor.state(0.0, TimeLeft(20.0, 15.0, 30.0))
    assert (state.eta_s, state.eta_range_s) == (20.0, (15.0, 30.0))


def test_batches_count_as_full_or_empty_only_while_shards_are_queued(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", ((0, 5),)))
    monitor.reported(make_report("w1", ((0, 5),), used_place_s=60.0, offered_place_s=80.0))
    monitor.reported(make_report("w1", ((0, 5),), used_place_s=60.0, offered_place_s=800.0), is_tail=True)
    assert monitor.batch_fill == monitor.state(1.0).batch_fill == 0.75


def test_prompt_tokens_that_were_not_computed_are_a_share_of_the_finished_shards(monitor: JobMonitor) -> None:
    assert monitor.state(1.0).prefix_hit_rate is None
    monitor.committed(ShardOutcome(0, "w1", 10, 0, 0, 300, 7, PromptReuse(300, 240)))
    monitor.committed(ShardOutcome(1, "w1", 10, 0, 0, 100, 7, PromptReuse(100, 0)))
    monitor.committed(monitor.unknown_outcome(2, "w1"))
    assert monitor.state(2.0).prefix_hit_rate == 0.6


def test_errors_in_parts_of_runs_before_are_counted() -> None:
    before = JobState("loading engines", 0.0, rows_done=14, rows_error=4, rows_reused=14, prompt_tokens=50)
    monitor = JobMonitor([make_shard(i, 10) for i in range(2)], {0: 10}, {}, before, num_reused=10)
    monitor.committed(ShardOutcome(1, "w1", 10, num_errors=1, num_reused=3, prompt_tokens=7, completion_tokens=9))
    state = monitor.state(1.0)
    assert (state.rows_error, state.rows_reused, state.prompt_tokens, state.completion_tokens) == (5, 14, 57, 9)


def test_rows_done_never_become_fewer(monitor: JobMonitor) -> None:
    """Those of a lost worker are in its journals; those of a run before, where a coordinator has not found them yet."""
    monitor.reported(make_report("w1", ((0, 4),)))
    assert monitor.state(1.0).rows_done == 16
    monitor.lost("w1")
    assert monitor.state(2.0).rows_done == 16
    monitor.reported(make_report("w2", ((0, 9), (1, 2))))
    assert monitor.state(3.0).rows_done == 19
    known = JobState("loading engines", 0.0, rows_done=25)
    resumed = JobMonitor([make_shard(i, 10) for i in range(4)], {3: 10}, {}, known)
    assert resumed.state(1.0).rows_done == 25
    resumed.reported(make_report("w1", ((0, 1), (1, 2))))
    assert resumed.state(2.0).rows_done == 27


def test_workers_show_adapters_of_the_job_by_name(monitor: JobMonitor) -> None:
    finished, telemetry = (FinishedRows("sha-a", 1, 5),), EngineTelemetry(resident_adapter_ids=("of-another", "sha-a"))
    monitor.reported(make_report("w1", (), telemetry=telemetry, finished=finished))
    assert monitor.state(1.0).workers[0].resident_adapters == ("a",)


def make_fill_report(worker: str, used: float, offered: float, open_rows: int = 4) -> WorkerReport:
    shards = ((0, open_rows),) if open_rows else ()
    return WorkerReport(worker, "ready", 8, open_shards=shards, used_place_s=used, offered_place_s=offered)


def test_before_anybody_has_worked_nothing_is_said() -> None:
    fill = BatchFill()
    assert fill.share is None
    fill.reported(make_fill_report("a", 0.0, 80.0, open_rows=0))
    fill.reported(make_fill_report("a", 0.0, 80.0))
    assert fill.share is None


def test_time_before_a_workers_first_rows_does_not_count_and_later_waiting_does() -> None:
    fill = BatchFill()
    fill.reported(make_fill_report("a", 0.0, 800.0, open_rows=0))
    fill.reported(make_fill_report("a", 0.0, 808.0))
    fill.reported(make_fill_report("a", 80.0, 888.0))
    assert fill.share == 1.0
    fill.reported(make_fill_report("a", 80.0, 968.0, open_rows=0))
    assert fill.share == 0.5


def test_nothing_is_said_of_the_first_seconds() -> None:
    fill = BatchFill()
    fill.reported(make_fill_report("a", 0.0, 0.0))
    fill.reported(make_fill_report("a", 0.0, 39.0))
    assert fill.share is None
    fill.reported(make_fill_report("a", 10.0, 40.0))
    assert fill.share == 0.25


def test_workers_count_by_their_places() -> None:
    fill = BatchFill()
    for worker, used in (("a", 160.0), ("b", 80.0)):
        fill.reported(make_fill_report(worker, 0.0, 0.0))
        fill.reported(make_fill_report(worker, used, 160.0))
    assert fill.share == 0.75
