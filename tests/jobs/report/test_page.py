"""The report stands alone, tells the account, and trusts nothing that came from outside."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

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
    for part in ("1,198", "4,000", "40.0 s", "too long", "not predicted"):
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
    head, first, second = rows
    shown = dict(zip(head, first, strict=True))
    assert shown["adapter"] == 'a "quoted", name'
    assert [shown[name] for name in ("rows", "generated", "share", "cost")] == ["10", "3000", "0.75", "0.75"]
    assert dict(zip(head, second, strict=True))["adapter"] == "(base model)"


def test_names_and_messages_from_outside_are_text_not_markup(store: JobStore) -> None:
    finish(store, adapter=ATTACK)
    html = write_report(store)
    assert ATTACK not in html
    assert ATTACK in _Page(html).text


def scored(mean: float, **more: Any) -> dict[str, Any]:
    return {"num_scored": 10, "num_rows": 10, "mean": mean, "interval": [mean - 0.2, mean + 0.2], **more}


@pytest.mark.parametrize("has_base", [True, False])
def test_scores_are_beside_base_and_best_with_the_rows_that_flipped(store: JobStore, has_base: bool) -> None:
    finish(store)
    found = summary("late", "", ATTACK)
    pair = {"adapter": "late", "num_rows": 10, "difference": -0.3, "interval": [-0.5, -0.1], "p_value": 0.03125}
    pair |= {"num_better": 1, "num_worse": 4}
    flip = {"id": 7, "right": "yes", "before": f"no {ATTACK}", "answer": "yes!", "is_better": True}
    found["adapters"][0]["score"] = scored(0.8)
    found["adapters"][1]["score"] = scored(0.4, to_best=pair) if has_base else None
    found["adapters"][2]["score"] = scored(0.5, to_best=pair, flips=[flip], **({"to_base": pair} if has_base else {}))
    store.write_summary(found)
    html = write_report(store, "2 EUR")
    assert ATTACK not in html
    text = " ".join(_Page(html).text.split())
    assert "80.0% 60.0% to 100.0% 10" in text
    assert "-30.0% (-50.0% to -10.0%) 1, 4 0.0312" in text
    assert ("beside the base model" in text) == has_base
    assert f"1 row with another score than {'base model' if has_base else 'late'}" in text
    assert f"7yesno {ATTACK}yes!higher" in text
    assert text.index("80.0%") < text.index("50.0%"), "the best first"
    (address,) = _Page(html).addresses
    head, *rows = csv.reader(base64.b64decode(address.partition("base64,")[2]).decode().splitlines())
    of_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert (of_name["late"]["score"], of_name[ATTACK]["to best"]) == ("0.8", "-0.3")


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


def test_what_was_predicted_and_the_bound_stand_beside_what_it_took_and_say_on_what_they_rest(store: JobStore) -> None:
    finish(store)
    store.write_summary({**(store.read_summary() or {}), "working_s": 36.5, "predicted_s": 30.0})
    text = _Page(write_report(store)).text
    assert "Answering took 36.5 s, 1.22 times the 30.0 s that the plan predicted" in text
    assert "could have answered these rows are not known" in text
    store.write_summary({**(store.read_summary() or {}), "bound_s": 18.25})
    text = _Page(write_report(store)).text
    assert "no schedule takes less than 18.2 s to answer these rows; this run took 2.00 times that" in text
    # The plan is of all rows, and a run that goes on has answered some of them.
    store.write_summary({**(store.read_summary() or {}), "num_reused": 3})
    assert "times the 30.0 s" not in _Page(write_report(store)).text


def test_the_first_row_has_four_figures_and_the_others_are_folded(store: JobStore) -> None:
    finish(store)
    for price in (None, "100 EUR"):
        first, _, rest = write_report(store, price).partition('<dl class="facts first">')[2].partition("</dl>")
        assert first.count("<dt>") == 4
        assert "rows answered" in first
        assert ("cost, EUR" in first) == (price is not None)
        assert "<details><summary>More figures</summary>" in rest


@pytest.mark.parametrize("price", ["much", "-1", "nan", "2.5 EUR a day", "2.5 <b>", True, "1e999"])
def test_a_price_that_cannot_be_read_is_refused(store: JobStore, price: Any) -> None:
    with pytest.raises(JobRequestError, match=r"gpu_hour_price=.*expected a number"):
        write_report(store, price)


def test_examples_are_text_and_folded(store: JobStore) -> None:
    finish(store)
    found = store.read_summary() or {}
    examples = [{"id": ATTACK, "prompt_end": f"ask {ATTACK}", "answer": f"line\n{ATTACK}", "finish_reason": "stop"}]
    found["adapters"][0] |= {"examples": examples, "finish_reasons": {"stop": 10}, "num_cut": 0}
    store.write_summary(found)
    html = write_report(store)
    assert ATTACK not in html
    assert f"line\n{ATTACK}" in _Page(html).text
    assert "<details><summary>tenant: 1 of 10 answers</summary>" in html


def test_costs_are_shared_by_the_seconds_of_the_cost_model(store: JobStore) -> None:
    finish(store)
    found = store.read_summary() or {}
    for count, seconds in zip(found["adapters"], (1.0, 9.0), strict=True):
        count["engine_s"] = seconds
    store.write_summary(found)
    html = write_report(store, gpu_hour_price=100.0)
    (address,) = _Page(html).addresses
    rows = list(csv.DictReader(base64.b64decode(address.partition("base64,")[2]).decode().splitlines()))
    assert [(row["adapter"], row["share"], row["cost"]) for row in rows] == [
        ("(base model)", "0.9", "0.9"),
        ("tenant", "0.1", "0.1"),
    ]
    assert "by seconds of the cost model, as in a plan" in html


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
