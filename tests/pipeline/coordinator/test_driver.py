"""A coordinator's translations: reports into events, commands into tasks, both into lines of `events.jsonl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.coordinator.driver import EventLog, event_of, latest_reports
from lorabatch.pipeline.messages import WorkerReport
from lorabatch.scheduler.messages import Event, FinishedRows, FinishJob, StepTotals, Tick, UnfinishedRows


def report(worker: str, running_rows: int = 0) -> WorkerReport:
    return WorkerReport(worker, "ready", 8, telemetry=EngineTelemetry(num_running=running_rows))


def test_the_last_report_of_each_worker_counts() -> None:
    events = [(1.0, report("a", 1)), (2.0, report("b", 2)), (3.0, report("a", 3))]
    assert {r.worker: r.running_rows for r, _ in latest_reports(events)} == {"a": 3, "b": 2}


def test_reports_have_an_age() -> None:
    events = [(1.0, report("hung")), (2.0, report("a")), (40.0, report("a"))]
    assert [(r.worker, age_s) for r, age_s in latest_reports(events)] == [("hung", 39.0), ("a", 0.0)]
    assert latest_reports([]) == []


def test_a_report_goes_to_the_scheduler_as_it_is() -> None:
    sent = WorkerReport(
        "a",
        "ready",
        8,
        open_shards=(UnfinishedRows(1, 5), UnfinishedRows(2, 6)),
        lent_shards=(UnfinishedRows(1, 2),),
        telemetry=EngineTelemetry(resident_adapter_ids=("sha-x",)),
        finished=(FinishedRows("sha-x", 3, 30), FinishedRows(None, 1, 4)),
    )
    event = event_of(sent, 7.0)
    assert (event.time_s, event.replica_id, event.open_rows) == (7.0, "a", 11)
    assert (event.open_shards, event.lent_shards) == (sent.open_shards, sent.lent_shards)
    assert (event.resident_adapters, event.finished) == (("sha-x",), sent.finished)


def test_merges_and_waits_for_adapters_are_no_seconds_of_steps() -> None:
    steps = StepTotals(4, prefill_tokens=50, decode_rows=6)
    telemetry = EngineTelemetry(
        num_running=5,
        num_prefilling=2,
        prefill_tokens_left=70,
        busy_s=9.0,
        adapters=AdapterUse(switching_s=3.0, stall_s=1.0),
        steps=steps,
    )
    event = event_of(WorkerReport("a", "ready", 8, telemetry=telemetry), 7.0)
    assert (event.running_rows, event.prefilling_rows, event.prefill_tokens_left) == (5, 2, 70)
    assert (event.engine_s, event.steps) == (5.0, steps)
    assert Event.from_json(event.to_json()) == event


BEGINNING = {"kind": "SchedulerStarted"}


def test_events_and_commands_are_in_order_after_the_beginning(tmp_path: Path) -> None:
    store = JobStore(str(tmp_path))
    events = EventLog(store, BEGINNING)
    events.add(Tick(1.5), FinishJob())
    events.flush()
    events.flush()
    assert [line["kind"] for line in store.read_events()] == ["SchedulerStarted", "Tick", "FinishJob"]


def test_what_storage_refuses_is_written_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = JobStore(str(tmp_path))
    events = EventLog(store, BEGINNING)

    def refuse(lines: bytes) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch:
        patch.setattr(store, "append_events", refuse)
        events.flush()
    events.add(Tick(1.0))
    events.flush()
    assert [line["kind"] for line in store.read_events()] == ["SchedulerStarted", "Tick"]
