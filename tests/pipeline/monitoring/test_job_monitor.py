"""What is known of a running job: rows counted once, wherever they are.

How full batches were: from a worker's first rows on, over all workers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.jobs.progress import AdapterCount
from lorabatch.jobs.record import JobState
from lorabatch.pipeline.messages import PromptReuse, ShardOutcome, WorkerReport
from lorabatch.pipeline.monitoring.job_monitor import BatchFill, JobMonitor
from lorabatch.scheduler.estimates.time_left import TimeLeft
from lorabatch.scheduler.messages import FinishedRows
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.tests.scheduler.unfinished import unfinished


def make_shard(shard_id: int, num_rows: int) -> Shard:
    return Shard(shard_id, 0, "unmerged", ("a",), num_rows, prompt_tokens=10, predicted_output_tokens=10)


def make_report(worker: str, open_shards: tuple[tuple[int, int], ...], **facts: object) -> WorkerReport:
    return WorkerReport(worker, "ready", batch_rows=8, open_shards=unfinished(*open_shards), **facts)  # type: ignore[arg-type]


@pytest.fixture
def monitor() -> JobMonitor:
    return JobMonitor([make_shard(i, 10) for i in range(4)], {3}, {"sha-a": "a"})


def test_rows_of_parts_that_were_there_before_count_as_done(monitor: JobMonitor) -> None:
    state = monitor.state(1.0, rows_left=30)
    assert (state.rows, state.rows_done, state.shards, state.shards_done) == (40, 10, 4, 1)


def test_outcomes_of_committed_shards_are_added_up(monitor: JobMonitor) -> None:
    assert monitor.state(1.0, rows_left=24).rows_done == 16
    monitor.committed(ShardOutcome(0, "w1", 10, num_errors=1, num_reused=0, prompt_tokens=5, completion_tokens=7))
    state = monitor.state(2.0, rows_left=20)
    assert (state.rows_done, state.rows_error, state.shards_done, state.completion_tokens) == (20, 1, 2, 7)


def test_engines_load_until_one_is_ready(monitor: JobMonitor) -> None:
    assert monitor.state(1.0, 30).phase == "loading engines"
    monitor.reported(replace(make_report("w1", ()), state="starting"))
    assert monitor.state(1.0, 30).phase == "loading engines"
    monitor.reported(make_report("w2", ()))
    assert monitor.state(1.0, 30).phase == "running"


def test_seconds_without_a_row_or_a_token_are_counted_and_then_no_time_is_left(monitor: JobMonitor) -> None:
    left = TimeLeft(15.0, 10.0, 20.0)
    monitor.reported(make_report("w1", ((0, 10),), tokens_per_s=5.0))
    assert monitor.state(100.0, 30, left).still_s == 0.0
    monitor.reported(make_report("w1", ((0, 10),), prompt_tokens_per_s=5.0))
    assert monitor.state(140.0, 30, left).still_s == 0.0
    monitor.reported(make_report("w1", ((0, 10),)))
    assert monitor.state(155.0, 30, left).time_left == "about 0:15 left (0:10 to 0:20)"
    still = monitor.state(170.0, 30, left)
    assert (still.still_s, still.time_left) == (30.0, "")
    monitor.reported(make_report("w1", ((0, 9),)))
    assert monitor.state(180.0, 29, left).still_s == 0.0
    monitor.reported(make_report("w1", ((0, 9),), tokens_per_s=5.0))
    assert [monitor.state(at_s, 29).still_s for at_s in (190.0, 200.0, 225.0)] == [0.0, 10.0, 35.0], "an old report"


def test_a_lost_worker_is_not_shown(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", ((0, 4),)))
    monitor.lost("w1")
    assert monitor.state(1.0, 30).workers == ()


def test_the_time_left_and_its_range_are_part_of_the_state(monitor: JobMonitor) -> None:
    assert monitor.state(0.0, 30).eta_s is None
    state = monitor.state(0.0, 30, TimeLeft(20.0, 15.0, 30.0))
    assert (state.eta_s, state.eta_range_s) == (20.0, (15.0, 30.0))


def test_batches_count_as_full_or_empty_only_while_shards_are_queued(monitor: JobMonitor) -> None:
    monitor.reported(make_report("w1", ((0, 5),)))
    monitor.reported(make_report("w1", ((0, 5),), filled_s=7.5, elapsed_s=10.0))
    monitor.reported(make_report("w1", ((0, 5),), filled_s=7.5, elapsed_s=100.0), is_tail=True)
    assert monitor.batch_fill == monitor.state(1.0, 30).batch_fill == 0.75


def test_prompt_tokens_that_were_not_computed_are_a_share_of_the_finished_shards(monitor: JobMonitor) -> None:
    assert monitor.state(1.0, 30).prefix_hit_rate is None
    monitor.committed(ShardOutcome(0, "w1", 10, 0, 0, 300, 7, PromptReuse(300, 240)))
    monitor.committed(ShardOutcome(1, "w1", 10, 0, 0, 100, 7, PromptReuse(100, 0)))
    monitor.committed(monitor.unknown_outcome(2, "w1"))
    assert monitor.state(2.0, 30).prefix_hit_rate == 0.6


def test_errors_in_parts_of_runs_before_are_counted() -> None:
    before = JobState("loading engines", 0.0, rows_done=14, rows_error=4, rows_reused=14, prompt_tokens=50)
    monitor = JobMonitor([make_shard(i, 10) for i in range(2)], {0}, {}, before, num_reused=10)
    monitor.committed(ShardOutcome(1, "w1", 10, num_errors=1, num_reused=3, prompt_tokens=7, completion_tokens=9))
    state = monitor.state(1.0, 30)
    assert (state.rows_error, state.rows_reused, state.prompt_tokens, state.completion_tokens) == (5, 14, 57, 9)


def test_rows_done_never_become_fewer(monitor: JobMonitor) -> None:
    """Those of a lost worker are in its journals; those of a run before, where a coordinator has not found them yet."""
    assert monitor.state(1.0, rows_left=24).rows_done == 16
    assert monitor.state(2.0, rows_left=30).rows_done == 16
    assert monitor.state(3.0, rows_left=21).rows_done == 19
    known = JobState("loading engines", 0.0, rows_done=25)
    resumed = JobMonitor([make_shard(i, 10) for i in range(4)], {3}, {}, known)
    assert resumed.state(1.0, rows_left=30).rows_done == 25
    assert resumed.state(2.0, rows_left=13).rows_done == 27


def test_workers_show_adapters_of_the_job_by_name(monitor: JobMonitor) -> None:
    finished, telemetry = (FinishedRows("sha-a", 1, 5),), EngineTelemetry(resident_adapter_ids=("of-another", "sha-a"))
    monitor.reported(make_report("w1", (), telemetry=telemetry, finished=finished))
    assert monitor.state(1.0, 30).workers[0].resident_adapters == ("a",)


def make_fill_report(worker: str, filled_s: float, elapsed_s: float, open_rows: int = 4) -> WorkerReport:
    shards = unfinished((0, open_rows)) if open_rows else ()
    return WorkerReport(worker, "ready", 8, open_shards=shards, filled_s=filled_s, elapsed_s=elapsed_s)


def test_before_anybody_has_worked_nothing_is_said() -> None:
    fill = BatchFill()
    assert fill.share is None
    fill.reported(make_fill_report("a", 0.0, 10.0, open_rows=0))
    fill.reported(make_fill_report("a", 0.0, 10.0))
    assert fill.share is None


def test_time_before_a_workers_first_rows_does_not_count_and_later_waiting_does() -> None:
    fill = BatchFill()
    fill.reported(make_fill_report("a", 0.0, 100.0, open_rows=0))
    fill.reported(make_fill_report("a", 0.0, 101.0))
    fill.reported(make_fill_report("a", 10.0, 111.0))
    assert fill.share == 1.0
    fill.reported(make_fill_report("a", 10.0, 121.0, open_rows=0))
    assert fill.share == 0.5


def test_nothing_is_said_of_the_first_seconds() -> None:
    fill = BatchFill()
    fill.reported(make_fill_report("a", 0.0, 0.0))
    fill.reported(make_fill_report("a", 0.0, 4.9))
    assert fill.share is None
    fill.reported(make_fill_report("a", 1.25, 5.0))
    assert fill.share == 0.25


def test_workers_count_alike() -> None:
    fill = BatchFill()
    for worker, filled_s in (("a", 20.0), ("b", 10.0)):
        fill.reported(make_fill_report(worker, 0.0, 0.0))
        fill.reported(make_fill_report(worker, filled_s, 20.0))
    assert fill.share == 0.75


def adapters_of(monitor: JobMonitor) -> dict[str, tuple[int, int, int]]:
    state = monitor.state(1.0, rows_left=0)
    assert list(state.adapter_rows) == [count.adapter for count in state.adapters]
    return {c.adapter: (c.num_rows, c.num_errors, c.completion_tokens) for c in state.adapters}


def outcome(shard_id: int, *counts: AdapterCount) -> ShardOutcome:
    return ShardOutcome(shard_id, "w1", 10, 0, 0, 0, 0, adapters=counts)


def finished(worker: str, *rows: FinishedRows) -> WorkerReport:
    return WorkerReport(worker, "ready", 8, finished=rows)


def test_rows_of_adapters_count_when_engines_finish_them_and_only_once() -> None:
    rows = {"a": 20, None: 8, "": 2, "no such": 10}
    monitor = JobMonitor(
        [make_shard(i, 10) for i in range(4)], {3}, {"sha-a": "a"}, None, 0, rows, [AdapterCount("a", 10, 1, 70)]
    )
    assert monitor.state(1.0, 0).adapter_rows == {"": 10, "a": 20, "no such": 10}
    assert adapters_of(monitor) == {"": (0, 0, 0), "a": (10, 1, 70), "no such": (0, 0, 0)}
    monitor.reported(finished("w1", FinishedRows("sha-a", 4, 9), FinishedRows(None, 3, 9), FinishedRows("sha-x", 5, 9)))
    assert adapters_of(monitor) == {"": (3, 0, 0), "a": (14, 1, 70), "no such": (0, 0, 0)}
    monitor.committed(outcome(0, AdapterCount("a", 4, 0, 9), AdapterCount("no such", 6, 6, 0)))
    assert adapters_of(monitor) == {"": (3, 0, 0), "a": (14, 1, 79), "no such": (6, 6, 0)}


def test_rows_of_a_lost_worker_are_not_counted_twice() -> None:
    monitor = JobMonitor([make_shard(0, 10)], (), {"sha-a": "a"}, adapter_rows={"a": 10})
    monitor.reported(finished("w1", FinishedRows("sha-a", 6, 9)))
    monitor.lost("w1")
    monitor.lost("w1")
    assert adapters_of(monitor) == {"a": (0, 0, 0)}
    monitor.reported(finished("w2", FinishedRows("sha-a", 9, 9)))
    assert adapters_of(monitor) == {"a": (9, 0, 0)}
    monitor.reported(finished("w2", FinishedRows("sha-a", 9, 9)))
    assert adapters_of(monitor) == {"a": (10, 0, 0)}
    monitor.committed(outcome(0, AdapterCount("a", 10, 0, 50)))
    assert adapters_of(monitor) == {"a": (10, 0, 50)}


def test_a_state_has_the_adapters_with_the_most_rows() -> None:
    rows = {f"a{i:04}": 1 + i // 2 for i in range(10_000)} | {"long " * 60: 10**6, "none": 0}
    state = JobMonitor([make_shard(0, 10)], (), {}, adapter_rows=rows).state(1.0, 0)
    assert list(state.adapter_rows) == [f"a{i:04}" for i in range(9950, 10_000)]
    assert len(state.to_json()) < 10_000


def test_what_adapters_cost_is_added_up_over_workers_and_engines(monitor: JobMonitor) -> None:
    """Counts before an engine's first report are of other runs; an engine that starts again counts from zero."""

    def reported(worker: str, loads: int, stall_s: float, fetches: int = 0) -> None:
        telemetry = EngineTelemetry(adapters=AdapterUse(loads=loads, stall_s=stall_s))
        monitor.reported(make_report(worker, (), telemetry=telemetry, fetches=AdapterUse(peer_fetches=fetches)))

    reported("w1", 100, 9.0)
    reported("w2", 0, 0.0, fetches=1)
    reported("w1", 103, 9.5)
    reported("w2", 4, 1.0, fetches=3)
    assert monitor.state(1.0, 30).adapter_use == AdapterUse(loads=7, stall_s=1.5, peer_fetches=2)
    reported("w2", 0, 0.0, fetches=3)  # another process
    reported("w2", 2, 0.25, fetches=4)
    assert monitor.state(1.0, 30).adapter_use == AdapterUse(loads=9, stall_s=1.75, peer_fetches=3)
    of_worker = {worker.address: worker.adapters for worker in monitor.state(1.0, 30).workers}
    assert of_worker["w2"] == AdapterUse(loads=2, stall_s=0.25, peer_fetches=4)
    again = JobMonitor([make_shard(0, 10)], set(), {}, monitor.state(1.0, 30))
    assert again.adapter_use == monitor.adapter_use, "a coordinator that takes over goes on counting"
