"""What people see of a job: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from datetime import datetime

import pytest
from rich.console import Console

from lorabatch.console.progress import ConsoleProgress, job_display, job_line
from lorabatch.jobs.record import JobState, WorkerState

WORKERS = (
    WorkerState("tcp://w1", tokens_per_s=40.0, open_rows=128, running_rows=64, mode="unmerged", prefix_hit_rate=0.81),
    WorkerState("tcp://w2", 50.0, 100, 60, "merged", ("pirate", "sql", "a", "b", "c")),
)
RUNNING = JobState(
    "running", 1.0, rows=200, rows_done=50, rows_error=2, shards=8, shards_done=2, tokens_per_s=90.0, eta_s=75.0,
    workers=WORKERS,
)  # fmt: skip


def test_a_line_tells_rows_errors_rates_and_time_left() -> None:
    line = job_line(RUNNING, elapsed_s=25.0, rows_per_s=2.0)
    assert line.startswith("[0:25] running  48 of 200 rows answered, 2 errors  2/8 shards")
    assert "2.0 rows/s  90 tokens/s  124 running on 2 workers  about 1:15 left" in line
    # A worker's report may be older than the rows that are done.
    ending = replace(RUNNING, rows_done=197, workers=WORKERS[:1])
    assert "  3 running on 1 worker  " in job_line(ending, elapsed_s=25.0, rows_per_s=2.0)
    resumed = replace(RUNNING, rows_reused=40, eta_range_s=(50.0, 120.0))
    line = job_line(resumed, elapsed_s=25.0, rows_per_s=2.0)
    assert "48 of 200 rows answered, 2 errors, 40 from an earlier run" in line
    assert line.endswith("about 1:15 left (0:50 to 2:00)")


def test_a_line_tells_nothing_that_is_not_known_yet() -> None:
    assert job_line(JobState("indexing", 1.0, rows=200), 2.0, 0.0) == "[0:02] indexing  0 of 200 rows indexed"
    resumed = JobState("indexing", 1.0, rows=200, rows_indexed=64, rows_done=50)
    assert job_line(resumed, 2.0, 0.0) == "[0:02] indexing  64 of 200 rows indexed  50 of 200 rows answered"
    loading = JobState("loading engines", 1.0, rows=200)
    assert job_line(loading, 5.0, 0.0) == "[0:05] loading engines  0 of 200 rows answered"
    starting = replace(loading, workers=(WorkerState("tcp://w1", mode="starting"),))
    assert job_line(starting, 5.0, 0.0).endswith("loading engines  0 of 200 rows answered  0 of 1 worker ready")
    predicted = replace(loading, eta_s=75.0, eta_range_s=(50.0, 120.0))
    assert job_line(predicted, 5.0, 0.0).endswith("  engines load, then about 1:15 (0:50 to 2:00)")


def test_a_line_says_for_how_long_nothing_moves_and_then_has_no_time_left() -> None:
    no_row = job_line(RUNNING, 25.0, 2.0, no_row_s=70.0)
    assert no_row.endswith("124 running on 2 workers  no row has finished for 1:10  about 1:15 left"), "tokens move"
    still = job_line(replace(RUNNING, tokens_per_s=0.0, still_s=65.0), 25.0, 2.0, no_row_s=70.0)
    assert still.endswith("0 tokens/s  124 running on 2 workers  no row has finished for 1:10")
    silent = job_line(RUNNING, 25.0, 2.0, silent_s=12.0, no_row_s=70.0)
    assert silent == "[0:25] running  48 of 200 rows answered, 2 errors  no report for 0:12"
    console = Console(file=io.StringIO(), width=140)
    console.print(job_display(RUNNING, 25.0, 2.0, silent_s=12.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no report for 0:12" in shown
    assert "left" not in shown
    assert "tcp://w1" not in shown
    assert not [word for word in ("no report", "no row") if word in job_line(RUNNING, 25.0, 2.0, 5.0, 20.0)]


def test_a_display_counts_the_seconds_since_the_last_row_and_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, width=200)) as progress:
        for seconds, state in (
            (0, RUNNING), (40, replace(RUNNING, updated_at_s=41.0)),
            (10, replace(RUNNING, updated_at_s=51.0, rows_done=51)),
            (20, replace(RUNNING, updated_at_s=51.0, rows_done=51)),
        ):  # fmt: skip
            now[0] += seconds
            progress.update(state)
    lines = out.getvalue().splitlines()
    assert [text for line in lines for text in line.split("  ") if text.startswith("no ")] == [
        "no row has finished for 0:40",
        "no report for 0:20",
    ]


def test_without_a_terminal_a_line_is_printed_at_each_phase_and_not_at_each_update() -> None:
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, width=80)) as progress:
        for _ in range(5):
            progress.update(RUNNING)
        progress.update(JobState("done", 2.0, rows=200, rows_done=200))
    lines = out.getvalue().splitlines()
    stamps, stages = zip(*(line.split(" [") for line in lines), strict=True)
    assert [stage.split()[1] for stage in stages] == ["running", "done"]
    offsets = [datetime.fromisoformat(stamp).utcoffset() for stamp in stamps]
    assert offsets == [datetime.now().astimezone().utcoffset()] * 2


def test_rows_that_were_done_before_are_no_speed() -> None:
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, width=80)) as progress:
        progress.update(RUNNING)
    assert "  0.0 rows/s" in out.getvalue()


def test_the_display_has_a_line_per_worker_with_its_mode_and_adapters() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(job_display(RUNNING, 25.0, 2.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tcp://w1" in shown
    assert "merged" in shown
    assert "and 1 more" in shown
    assert "81%" in shown


def test_notes_of_a_job_are_printed_once() -> None:
    out = io.StringIO()
    with ConsoleProgress(Console(file=out, width=80)) as progress:
        for notes in ((), ("one",), ("one",), ("one", "two")):
            progress.update(replace(RUNNING, notes=notes))
    lines = [line.rpartition(" ") for line in out.getvalue().splitlines() if "running" not in line]
    assert [note for _, _, note in lines] == ["one", "two"]
    assert all(datetime.fromisoformat(stamp).tzinfo for stamp, _, _ in lines)
