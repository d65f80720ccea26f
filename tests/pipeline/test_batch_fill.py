"""How full batches were: from a worker's first rows on, over all workers."""

from __future__ import annotations

from lorabatch.pipeline.batch_fill import BatchFill
from lorabatch.pipeline.messages import HostReport


def make_report(worker: str, used: float, offered: float, open_rows: int = 4) -> HostReport:
    shards = ((0, open_rows),) if open_rows else ()
    return HostReport(worker, "ready", 8, open_shards=shards, used_place_s=used, offered_place_s=offered)


def test_before_anybody_has_worked_nothing_is_said() -> None:
    fill = BatchFill()
    assert fill.share is None
    fill.reported(make_report("a", 0.0, 80.0, open_rows=0))
    fill.reported(make_report("a", 0.0, 80.0))
    assert fill.share is None


def test_time_before_a_workers_first_rows_does_not_count_and_later_waiting_does() -> None:
    fill = BatchFill()
    fill.reported(make_report("a", 0.0, 800.0, open_rows=0))
    fill.reported(make_report("a", 0.0, 808.0))
    fill.reported(make_report("a", 8.0, 816.0))
    assert fill.share == 1.0
    fill.reported(make_report("a", 8.0, 824.0, open_rows=0))
    assert fill.share == 0.5


def test_workers_count_by_their_places() -> None:
    fill = BatchFill()
    for worker, used in (("a", 16.0), ("b", 8.0)):
        fill.reported(make_report(worker, 0.0, 0.0))
        fill.reported(make_report(worker, used, 16.0))
    assert fill.share == 0.75
