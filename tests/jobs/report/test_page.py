"""The report stands alone, tells the account, and trusts nothing that came from outside."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lorabatch.jobs.errors import DamagedRecordError, JobRequestError
from lorabatch.jobs.record import JobRecord, JobState
from lorabatch.jobs.report.page import save_report, write_report
from lorabatch.jobs.status.logs import log_lines
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import (
    EVENTS_VERSION,
    MigrateRows,
    ReplicaJoined,
    ReplicaReported,
    RunShard,
    ShardCommitted,
)

from .journals import ATTACK, append, busy_run, summary


class _Page(HTMLParser):
    """What stands in the page itself, and every address it names. What Bokeh draws is looked at in a browser."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text = ""
        self._is_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_script = tag in ("script", "style")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._is_script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_script else data


@pytest.fixture
def store(tmp_path: Path, record: Callable[..., JobRecord]) -> JobStore:
    store = JobStore(str(tmp_path / "job"))
    store.freeze(record())
    return store


def finish(store: JobStore, adapter: str = "tenant") -> None:
    append(
        store,
        ReplicaJoined(0.0, "tcp://w1", 8),
        RunShard(0, "tcp://w1", 0),
        ReplicaReported(1.0, "tcp://w1", 8, 8, 250.0, (adapter,), mode="merged"),
        MigrateRows(0, "tcp://w1", "tcp://w2", 3),
        ShardCommitted(36.0, 0, "tcp://w1"),
    )
    errors = [{"kind": "prompt", "num_rows": 2, "location": "a:1", "sentence": f"too long {ATTACK}"}]
    store.write_summary(summary(adapter, "", num_errors=2, errors=errors))
    store.mark_success()


def test_it_tells_counts_errors_and_time(store: JobStore) -> None:
    finish(store)
    text = _Page(write_report(store)).text
    for part in ("1,198", "4,000", "36.0 s", "too long", "not predicted"):
        assert part in text


def test_it_needs_nothing_but_itself(store: JobStore) -> None:
    finish(store)
    html = write_report(store)
    (csv,) = _Page(html).addresses
    assert csv.startswith("data:text/csv;")
    assert "@import" not in html


def test_adapters_are_a_csv_too(store: JobStore) -> None:
    finish(store, adapter='a "quoted", name')
    (address,) = _Page(write_report(store, gpu_hour_price=100.0)).addresses
    rows = list(csv.reader(base64.b64decode(address.partition("base64,")[2]).decode().splitlines()))
    assert rows == [
        ["adapter", "rows", "errors", "generated tokens", "share", "cost"],
        ['a "quoted", name', "10", "0", "3000", "0.75", "0.75"],
        ["(base model)", "10", "0", "1000", "0.25", "0.25"],
    ]


def test_names_and_messages_from_outside_are_text_not_markup(store: JobStore) -> None:
    finish(store, adapter=ATTACK)
    html = write_report(store)
    assert ATTACK not in html
    assert ATTACK in _Page(html).text


def test_money_is_worker_time_at_the_price_shared_by_tokens(store: JobStore) -> None:
    finish(store)
    page = _Page(write_report(store, gpu_hour_price=100.0))
    # 36 s of one worker at 100 per hour is 1.
    for part in ("1.0000", "250.00"):
        assert part in page.text
    assert "cost" not in _Page(write_report(store)).text


@pytest.mark.parametrize(("version", "is_said"), [(EVENTS_VERSION, False), (EVENTS_VERSION - 1, True), (None, True)])
def test_events_of_another_version_are_said_not_to_be_all(store: JobStore, version: int | None, is_said: bool) -> None:
    first, *others = busy_run(2)
    append(store, first | {"version": version}, *others)
    assert ("not all of whose events are shown" in write_report(store)) == is_said
    assert any("some of them are not shown" in line for line in log_lines(store)) == is_said


def test_a_job_that_has_not_started_has_a_report_too(store: JobStore) -> None:
    page = _Page(write_report(store))
    assert "not started" in page.text
    assert "Timeline" not in page.text


def test_without_a_job_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match="no job there"):
        write_report(JobStore(str(tmp_path)))


def test_what_was_predicted_stands_beside_what_it_took(store: JobStore) -> None:
    finish(store)
    store.write_summary({**(store.read_summary() or {}), "working_s": 36.5})
    store.write_plan_facts({"predicted_s": 30.0, "shards": []})
    text = _Page(write_report(store)).text
    assert "first shard opened to last part36.5 s\npredicted for all rows30.0 s\nmeasured over predicted1.22\n" in text
    assert "lower bound, whatever the schedulenot known" in text
    store.write_summary({**(store.read_summary() or {}), "bound_s": 18.25})
    text = _Page(write_report(store)).text
    assert "lower bound, whatever the schedule18.2 s\nmeasured over lower bound2.00\n" in text
    # The plan is of all rows, and a run that goes on has answered some of them.
    store.write_summary({**(store.read_summary() or {}), "num_reused": 3})
    assert "measured over predicted" not in _Page(write_report(store)).text


def test_reused_prompts_are_a_number_of_the_job_where_they_were_counted(store: JobStore) -> None:
    finish(store)
    store.write_state(JobState("done", 1.0))
    assert "of prompt tokens reused" not in _Page(write_report(store)).text
    store.write_state(JobState("done", 1.0, prefix_hit_rate=0.807))
    assert "of prompt tokens reused80.7%" in _Page(write_report(store)).text


def test_a_place_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match=r"cannot be written .*Name a file in a folder"):
        save_report("page", tmp_path / "missing" / "report.html")


@pytest.mark.parametrize(
    "summary",
    [
        {"num_rows": "many", "num_errors": 0},
        {"num_rows": 3},
        {"num_rows": 3, "num_errors": 1, "errors": [{"kind": "prompt"}]},
        {"num_rows": 3, "num_errors": 1, "adapters": 7},
    ],
)
def test_records_of_another_shape_are_named(store: JobStore, summary: dict[str, object]) -> None:
    append(store, {"kind": "MigrateRows", "shard_id": {}}, {"kind": "ReplicaReported", "replica_id": []})
    store.write_summary(summary)
    store.mark_success()
    with pytest.raises(DamagedRecordError, match="cannot be read back") as raised:
        write_report(store)
    assert str(raised.value).isprintable()
