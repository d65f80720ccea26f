"""What a shard's task is told of its wave, and of workers that have its adapters.

Reports of hosts as a coordinator takes them in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.engine.request import EngineTelemetry
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.coordinator.driver import Journal, ShardBriefing, latest_reports, progress_of
from lorabatch.pipeline.messages import FinishedRows, ShardTask, WorkerReport
from lorabatch.scheduler.messages import FinishJob, LoadAdapter, RunShard, Tick
from lorabatch.scheduler.waves import Shard


def shard(number: int, *adapters: str, mode: str = "unmerged") -> Shard:
    return Shard(number, 0, mode, adapters, 32, 320, 3200)  # type: ignore[arg-type]


def test_a_load_holds_for_every_later_shard_of_its_adapter_on_that_worker() -> None:
    briefing = ShardBriefing("run", [shard(0, "x"), shard(1, "x", "y"), shard(2, "x")], 2)
    briefing.load(LoadAdapter("b", "x", "a"))
    briefing.load(LoadAdapter("b", "y", ""))
    assert briefing.task(RunShard(0, "b", 0)).sources == {"x": "a"}
    assert briefing.task(RunShard(1, "b", 0)).sources == {"x": "a"}
    assert briefing.task(RunShard(2, "c", 0)).sources == {}


def test_a_worker_that_was_lost_is_told_nothing_of_before() -> None:
    briefing = ShardBriefing("run", [shard(0, "x")], 2)
    briefing.load(LoadAdapter("b", "x", "a"))
    briefing.lost("b")
    assert briefing.task(RunShard(0, "b", 3)) == ShardTask("run", 0, 3)


def test_a_shard_of_a_merged_wave_knows_what_follows_it() -> None:
    shards = [shard(number, "x", mode="merged") for number in range(3)]
    briefing = ShardBriefing("run", shards, 2)
    assert [briefing.task(RunShard(number, "a", 0)).rows_behind for number in range(3)] == [32, 16, 0]


def report(worker: str, running_rows: int = 0) -> WorkerReport:
    return WorkerReport(worker, "ready", 8, telemetry=EngineTelemetry(num_running=running_rows))


def test_the_last_report_of_each_worker_counts() -> None:
    events = [(1.0, report("a", 1)), (2.0, report("b", 2)), (3.0, report("a", 3))]
    assert {r.worker: r.running_rows for r in latest_reports(events)} == {"a": 3, "b": 2}


def test_a_worker_that_was_silent_while_others_spoke_is_left_out() -> None:
    events = [(1.0, report("hung")), (2.0, report("a")), (40.0, report("a"))]
    assert [r.worker for r in latest_reports(events)] == ["a"]
    assert latest_reports([]) == []


def test_shards_without_a_task_are_not_running_and_adapters_have_names() -> None:
    told = WorkerReport(
        "a",
        "ready",
        8,
        open_shards=((1, 5), (2, 6)),
        lent_shards=((1, 2),),
        telemetry=EngineTelemetry(resident_adapter_ids=("sha-x",)),
        finished=(FinishedRows("sha-x", 3, 30), FinishedRows("", 1, 4)),
    )
    event = progress_of(told, 7.0, {2}, {"sha-x": "x"}.__getitem__)
    assert (event.time_s, event.replica_id, event.open_shards) == (7.0, "a", ((2, 6),))
    assert event.resident_adapters == ("x",)
    assert event.finished == (("x", 3, 30), ("", 1, 4))


BEGINNING = {"kind": "SchedulerStarted"}


def test_events_and_commands_stand_in_order_after_the_beginning(tmp_path: Path) -> None:
    store = JobStore(str(tmp_path))
    journal = Journal(store, BEGINNING)
    journal.add(Tick(1.5), FinishJob())
    journal.flush()
    journal.flush()
    assert [line["kind"] for line in store.read_events()] == ["SchedulerStarted", "Tick", "FinishJob"]


def test_what_storage_refuses_is_written_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(str(tmp_path))
    journal = Journal(store, BEGINNING)

    def refuse(lines: bytes) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_events", refuse)
        journal.flush()
    journal.add(Tick(1.0))
    journal.flush()
    assert [line["kind"] for line in store.read_events()] == ["SchedulerStarted", "Tick"]
