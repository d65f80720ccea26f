from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.journal import Journal
from lorabatch.scheduler.commands import FinishJob
from lorabatch.scheduler.events import Tick

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
