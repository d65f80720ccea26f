"""Reports of hosts as a coordinator takes them in."""

from __future__ import annotations

from lorabatch.pipeline.messages import FinishedRows, HostReport
from lorabatch.pipeline.report_events import latest_reports, progress_of


def report(worker: str, running_rows: int = 0) -> dict[str, object]:
    return HostReport(worker, "ready", 8, running_rows=running_rows).to_plain()


def test_the_last_report_of_each_worker_counts() -> None:
    events = [(1.0, report("a", 1)), (2.0, report("b", 2)), (3.0, report("a", 3))]
    assert {r.worker: r.running_rows for r in latest_reports(events)} == {"a": 3, "b": 2}


def test_a_worker_that_was_silent_while_others_spoke_is_left_out() -> None:
    events = [(1.0, report("hung")), (2.0, report("a")), (40.0, report("a"))]
    assert [r.worker for r in latest_reports(events)] == ["a"]
    assert latest_reports([]) == []


def test_shards_without_a_task_are_not_running_and_adapters_have_names() -> None:
    told = HostReport(
        "a",
        "ready",
        8,
        open_shards=((1, 5), (2, 6)),
        lent_shards=((1, 2),),
        resident_adapter_ids=("sha-x",),
        finished=(FinishedRows("sha-x", 3, 30), FinishedRows("", 1, 4)),
    )
    event = progress_of(told, 7.0, {2}, {"sha-x": "x"}.__getitem__)
    assert (event.time_s, event.replica_id, event.open_shards) == (7.0, "a", ((2, 6),))
    assert event.resident_adapters == ("x",)
    assert event.finished == (("x", 3, 30), ("", 1, 4))
