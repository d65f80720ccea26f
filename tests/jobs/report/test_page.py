"""The report stands alone, tells the account, and trusts nothing that came from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.record import JobRecord, JobState
from lorabatch.jobs.report.page import save_report, write_report
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import MigrateRows, Progress, ReplicaJoined, RunShard, ShardCommitted

ATTACK = "<script>alert(1)</script>"


class _Page(HTMLParser):
    """What a browser would see: text, tags, and every address the page names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def store(tmp_path: Path, record: Callable[..., JobRecord]) -> JobStore:
    store = JobStore(str(tmp_path / "job"))
    store.freeze(record())
    return store


def finish(store: JobStore, adapter: str = "tenant") -> None:
    events: list[Any] = [
        ReplicaJoined(0.0, "tcp://w1", 8),
        RunShard(0, "tcp://w1", 0),
        Progress(1.0, "tcp://w1", 8, 8, 250.0, (adapter,), mode="merged"),
        MigrateRows(0, "tcp://w1", "tcp://w2", adapter, 3),
        ShardCommitted(36.0, 0, "tcp://w1"),
    ]
    store.append_events("".join(json.dumps(e.to_json()) + "\n" for e in events).encode())
    store.write_summary(
        {
            "num_rows": 1200,
            "num_errors": 2,
            "num_parts": 1,
            "prompt_tokens": 5000,
            "completion_tokens": 4000,
            "seconds": 40.0,
            "adapters": [
                {"adapter": adapter, "num_rows": 900, "num_errors": 2, "completion_tokens": 3000},
                {"adapter": "", "num_rows": 300, "num_errors": 0, "completion_tokens": 1000},
            ],
            "errors": [{"kind": "prompt", "num_rows": 2, "location": "a:1", "sentence": f"too long {ATTACK}"}],
        }
    )
    store.mark_success()


def test_it_tells_counts_adapters_errors_and_time(store: JobStore) -> None:
    finish(store)
    page = _Page(write_report(store))
    for part in (
        "1,200",
        "4,000",
        "36.0 s",
        "tenant",
        "(base model)",
        "75.0%",
        "too long",
        "tcp://w1",
        "not predicted",
    ):
        assert part in page.text
    assert page.tags.count("polygon") == 1
    assert "3 rows of shard 0 (tenant) from tcp://w1 to tcp://w2" in page.text


def test_it_needs_nothing_but_itself(store: JobStore) -> None:
    finish(store)
    html = write_report(store)
    page = _Page(html)
    assert page.addresses == []
    assert "script" not in page.tags
    assert "@import" not in html


def test_names_and_messages_from_outside_are_text_not_markup(store: JobStore) -> None:
    finish(store, adapter=ATTACK)
    page = _Page(write_report(store))
    assert "script" not in page.tags
    assert ATTACK in page.text


def test_money_is_worker_time_at_the_price_shared_by_tokens(store: JobStore) -> None:
    finish(store)
    page = _Page(write_report(store, gpu_hour_price=100.0))
    # 36 s of one worker at 100 per hour is 1; a tenant with 3/4 of the tokens pays 0.75.
    for part in ("1.0000", "0.7500", "0.2500", "250.00"):
        assert part in page.text
    assert "cost" not in _Page(write_report(store)).text


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
    assert "36.5 sfirst shard opened to last part\n30.0 spredicted for all rows\n1.22measured over predicted\n" in text
    assert "not knownlower bound" in text
    store.write_summary({**(store.read_summary() or {}), "bound_s": 18.25})
    text = _Page(write_report(store)).text
    assert "18.2 slower bound, whatever the schedule\n2.00measured over lower bound\n" in text
    # The plan is of all rows, and a run that goes on has answered some of them.
    store.write_summary({**(store.read_summary() or {}), "num_reused": 3})
    assert "measured over predicted" not in _Page(write_report(store)).text


def test_reused_prompts_are_a_number_of_the_job_where_they_were_counted(store: JobStore) -> None:
    finish(store)
    store.write_state(JobState("done", 1.0))
    assert "of prompt tokens reused" not in _Page(write_report(store)).text
    store.write_state(JobState("done", 1.0, prefix_hit_rate=0.807))
    assert "80.7%of prompt tokens reused" in _Page(write_report(store)).text


def test_a_place_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match=r"cannot be written .*Name a file in a folder"):
        save_report("page", tmp_path / "missing" / "report.html")
