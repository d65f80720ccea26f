"""Shapes are drawn where their seconds are, and their number is bounded."""

from __future__ import annotations

import pytest

from lorabatch.jobs.report.drawing import MAX_LANES, NUM_COLUMNS, draw
from lorabatch.jobs.report.timeline import Move, RunTimeline, Sample, ShardSpan, WorkerTrack


def track(worker: str = "w", **changes: object) -> WorkerTrack:
    return WorkerTrack(worker, batch_rows=8, joined_s=0.0, **changes)  # type: ignore[arg-type]


def test_a_bar_covers_its_share_of_the_time() -> None:
    drawing = draw(RunTimeline([track(spans=[ShardSpan(1, 0, 25.0, 75.0, "committed")])], end_s=100.0))
    (bar,) = drawing.lanes[0].shards
    assert (bar.left, bar.width, bar.kind) == (NUM_COLUMNS / 4, NUM_COLUMNS / 2, "committed")


def test_a_sample_holds_until_the_next_and_ends_with_its_worker() -> None:
    samples = [Sample(10.0, 8, 100.0, "merged"), Sample(20.0, 4, 50.0, "unmerged")]
    lane = draw(RunTimeline([track(samples=samples, lost_s=30.0)], end_s=40.0)).lanes[0]
    at = {time_s: int(NUM_COLUMNS * time_s / 40) for time_s in (5, 15, 25, 35)}
    assert [lane.busy[at[t]] for t in (5, 15, 25, 35)] == [None, 1.0, 0.5, None]
    assert [(bar.kind, bar.left) for bar in lane.modes] == [("merged", 100), ("unmerged", 200)]


def test_throughput_is_the_sum_over_workers() -> None:
    tracks = [track(name, samples=[Sample(0.0, 1, rate, "base")]) for name, rate in (("v", 3.0), ("w", 4.0))]
    assert set(draw(RunTimeline(tracks, end_s=1.0)).tokens_per_s) == {7.0}


def test_many_shards_workers_and_moves_stay_a_bounded_picture() -> None:
    spans = [ShardSpan(i, 0, i * 0.001, i * 0.001 + 0.0005, "committed") for i in range(20_000)]
    tracks = [track(str(i), spans=spans if i == 0 else []) for i in range(MAX_LANES + 9)]
    moves = [Move(1.0, 1, "v", "w", "", 1)] * 5000
    drawing = draw(RunTimeline(tracks, moves, end_s=20.0))
    assert (len(drawing.lanes), drawing.num_hidden_lanes) == (MAX_LANES, 9)
    assert len(drawing.lanes[0].shards) <= NUM_COLUMNS + 1
    assert "and 49 more" in drawing.lanes[0].shards[3].title
    assert len(drawing.moves) <= NUM_COLUMNS


@pytest.mark.parametrize("end_s", [0.0, 0.05, 1.0, 37.0, 86_400.0])
def test_marks_are_round_few_and_inside(end_s: float) -> None:
    marks = draw(RunTimeline([track()], end_s=end_s)).marks_s
    assert marks[0] == 0.0
    assert 4 <= len(marks) <= 11
    assert marks[-1] <= (end_s or 1.0) * 1.001


def test_an_empty_run_is_an_empty_picture() -> None:
    drawing = draw(RunTimeline())
    assert (drawing.lanes, drawing.tokens_per_s, drawing.mean_busy) == ((), (), 0.0)
