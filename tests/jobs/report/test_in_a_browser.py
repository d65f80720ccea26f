"""What a browser shows of a report: bars at their seconds, nothing cut off, nothing run that came from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import Browser, needs_browser

from lorabatch.jobs.record import InputRecord, JobRecord
from lorabatch.jobs.report.page import write_report
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import (
    FoundReplica,
    ReplicaJoined,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)

from .journals import ATTACK, append, beginning, busy_run, summary

pytestmark = needs_browser
MODEL = "Bokeh.documents[0].get_model_by_name"
# Of written parts, as `figures.py` has it.
GREEN = (0x9C, 0xC5, 0xA1)

_IS_DRAWN = "window.Bokeh !== undefined && Bokeh.documents.length > 0 && Bokeh.documents.every(d => d.is_idle)"
# Of the timeline's lower axis: where it is, and the seconds at its marks.
_AXIS = """(() => {
  const [view] = [...Bokeh.index.query(view => view.model.name === "timeline")]
  const axis = view.views.find_one(view.model.below[0])
  const top = view.el.getBoundingClientRect().top + scrollY + axis.bbox.y0
  return {left: axis.bbox.x0, right: axis.bbox.x1, top, seconds: axis.tick_coords.major[0]}
})()"""
_TABLE = """[...Bokeh.index.query(view => view.model.name === "adapters")][0].el.shadowRoot"""
_TABLE_HEIGHTS = f"(([view]) => [view.clientHeight, view.scrollHeight])({_TABLE}.querySelectorAll('.slick-viewport'))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def store(tmp_path: Path, record: Callable[..., JobRecord]) -> JobStore:
    store = JobStore(str(tmp_path / "job"))
    roles = {"prompt": "prompt", "id": "id", "adapter": "adapter"}
    store.freeze(record(input=InputRecord(files=record().input.files, roles=roles, schema_ipc="")))
    return store


def show(browser: Browser, store: JobStore, folder: Path) -> None:
    (folder / "report.html").write_text(write_report(store))
    browser.open(f"file://{folder}/report.html")
    browser.until(lambda: browser.evaluate(_IS_DRAWN))


@pytest.mark.long
def test_a_bar_begins_and_ends_at_its_seconds(browser: Browser, store: JobStore, tmp_path: Path) -> None:
    events = [ReplicaJoined(0.0, "w", 8), Tick(20.0), RunShard(1, "w", 0), ShardCommitted(40.0, 1, "w"), Tick(58.0)]
    append(store, *events)
    show(browser, store, tmp_path)
    axis, pixels = browser.evaluate(_AXIS), browser.pixels()
    # Of the marks, only the long ones that have a label reach as far below the axis.
    below = pixels[round(axis["top"]) + 5]
    ticks = (below.max(axis=1) < 128).nonzero()[0]
    is_bar = (np.abs(pixels - GREEN) < 3).all(axis=2)
    widest = is_bar[is_bar.sum(axis=1).argmax()].nonzero()[0]
    np.testing.assert_allclose(np.interp([widest.min(), widest.max()], ticks, axis["seconds"]), [20.0, 40.0], atol=0.15)


def test_200_adapters_and_100_shards_are_readable_and_nothing_is_cut_off(
    browser: Browser, store: JobStore, tmp_path: Path
) -> None:
    append(store, *busy_run(100))
    store.write_summary(summary(*(f"tenant-{i:03d}-summaries" for i in range(200))))
    show(browser, store, tmp_path)
    assert "tenant-000-summaries" in browser.text()
    assert browser.evaluate(f"{MODEL}('adapters').source.get_length()") == 200
    assert browser.evaluate(f"{MODEL}('part written').data_source.get_length()") == 100
    shown, all_rows = browser.evaluate(_TABLE_HEIGHTS)
    assert shown < all_rows / 4  # the table scrolls in itself
    assert browser.cut_off() == []
    browser.change(800)
    assert browser.cut_off() == []


@pytest.mark.long
def test_the_table_is_searched_and_sorted(browser: Browser, store: JobStore, tmp_path: Path) -> None:
    append(store, *busy_run(4))
    store.write_summary(summary("zebra", "ant", "bee", "other"))
    show(browser, store, tmp_path)
    assert shown_rows(browser) == ["zebra", "ant", "bee", "other"]
    browser.evaluate(f"{_TABLE}.querySelector('.slick-header-column').click()")
    assert shown_rows(browser) == ["ant", "bee", "other", "zebra"]
    browser.evaluate(f"{MODEL}('search adapters').value_input = 'BE'")
    assert shown_rows(browser) == ["bee"]
    browser.evaluate(f"{MODEL}('search adapters').value_input = ''")
    assert shown_rows(browser) == ["ant", "bee", "other", "zebra"]


def shown_rows(browser: Browser) -> list[str]:
    rows = f"[...{_TABLE}.querySelectorAll('.slick-row')].sort((a, b) => a.offsetTop - b.offsetTop)"
    return browser.evaluate(f"{rows}.map(row => row.children[0].textContent)")  # type: ignore[no-any-return]


def test_nothing_is_loaded_and_what_comes_from_outside_is_text(
    browser: Browser, store: JobStore, tmp_path: Path
) -> None:
    attacker = store.read_record().adapters[0].model_copy(update={"name": ATTACK})
    store.replace_record(store.read_record().model_copy(update={"adapters": (attacker,)}))
    append(store, beginning(0.0, coordinator=ATTACK, **{ATTACK: 0.0}), ReplicaJoined(0.0, ATTACK, 8))
    append(store, RunShard(0, ATTACK, 0), ReplicaReported(1.0, ATTACK, 8, 8, 2.0, (ATTACK,), mode=ATTACK))
    append(store, {"kind": "RemoveReplica", "replica_id": ATTACK, "reason": ATTACK}, Tick(30.0))
    store.write_plan_facts({"shards": [{"shard_id": 0, "mode": "none"}], "adapter_names": [[ATTACK]]})
    error = {"kind": ATTACK, "num_rows": 1, "location": ATTACK, "sentence": ATTACK}
    store.write_summary(summary(ATTACK, num_errors=1, errors=[error]))
    write_part(store, [(ATTACK, ATTACK, ATTACK)])
    show(browser, store, tmp_path)
    assert ATTACK in browser.text()
    assert browser.evaluate("document.title") == "job-1 · lorabatch report"
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0


def test_errors_are_on_top_with_links_to_their_rows(browser: Browser, store: JobStore, tmp_path: Path) -> None:
    append(store, *busy_run(1))
    kinds = [{"kind": "prompt", "num_rows": 2, "location": "a:1", "sentence": "too long"}]
    store.write_summary(summary("tenant", num_errors=2, errors=kinds))
    write_part(store, [("7", "tenant", None), ("8", "tenant", "too long"), ("9", None, "too long")])
    show(browser, store, tmp_path)
    browser.evaluate("document.querySelector('a[href^=\"#error\"]').click()")
    row = browser.evaluate("document.querySelector(':target').innerText")
    assert row.split("\t") == ["8", "tenant", "part-00000.parquet, row 2", "too long"]
    heads = browser.evaluate("[...document.querySelectorAll('h2')].map(head => head.innerText)")
    assert heads == ["Errors: 2 rows", "What came out", "Timeline", "Workers", "Job"]


@pytest.mark.long
def test_two_coordinators_share_one_axis(browser: Browser, store: JobStore, tmp_path: Path) -> None:
    append(store, beginning(100.0, coordinator="v", starting=90.0, running=99.0))
    append(store, WorkersSeen(0.0, ("v", "w")), ReplicaJoined(1.0, "v", 8), ReplicaJoined(1.0, "w", 8))
    append(store, RunShard(0, "v", 0), RunShard(1, "w", 0), Tick(10.0))
    append(store, beginning(130.0, coordinator="w", starting=90.0, running=129.0))
    append(store, WorkersSeen(0.0, ("w",)), ReplicasFound(0.1, (FoundReplica("w", 8, (UnfinishedRows(1, 5),), 0.5),)))
    append(store, RunShard(0, "w", 1), ShardCommitted(10.0, 1, "w"), ShardCommitted(20.0, 0, "w"))
    show(browser, store, tmp_path)
    starts = browser.evaluate(f"{MODEL}('coordinator started').data_source.data.s")
    assert starts == [10.0, 40.0]
    text = browser.text()
    assert "w0 v" in text
    assert "w1 w" in text
    assert "starting 9.0 s, running 11.0 s, restarting 19.0 s, running 21.0 s" in text


@pytest.mark.long
def test_a_dark_window_has_a_dark_page(browser: Browser, store: JobStore, tmp_path: Path) -> None:
    append(store, *busy_run(4))
    store.write_summary(summary("tenant"))
    show(browser, store, tmp_path)
    assert np.median(browser.pixels()) > 240
    browser.change(1400, dark=True)
    assert np.median(browser.pixels()) < 60


def write_part(store: JobStore, rows: list[tuple[str, str | None, str | None]]) -> None:
    ids, adapters, errors = zip(*rows, strict=True)
    columns = {"id": ids, "adapter": adapters, "error": errors}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), sink)
    store.commit_part(0, sink.getvalue().to_pybytes())
