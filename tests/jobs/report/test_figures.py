"""What a drawing holds, and that it is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from bokeh.models import GlyphRenderer, Model, Range1d

from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.jobs.report.figures import adapter_figure, run_figures, worker_names
from lorabatch.jobs.report.timeline import Activity, Move, RunTimeline, ShardSpan, WorkerTrack, read_timelines
from lorabatch.jobs.status.worker_names import WorkerNames

from .journals import busy_run, lines


def bars(figures: Model, name: str) -> dict[str, list[float]]:
    (found,) = figures.select({"name": name})
    return found.data_source.data


def track(worker: str = "w", **changes: object) -> WorkerTrack:
    return WorkerTrack(worker, 8, **changes)  # type: ignore[arg-type]


def test_a_bar_has_the_seconds_of_its_shard_and_says_whose_rows_it_holds() -> None:
    run = RunTimeline([track(spans=[ShardSpan(1, 0, 25.0, 75.0, "committed")])], end_s=100.0)
    found = bars(run_figures(run, {1: {"pirate": "sha-p", "sql": "sha-s"}}), "part written")
    assert (found["left"], found["right"]) == ([25.0], [75.0])
    assert found["title"] == ["shard 1, attempt 0: committed, 50.0 s, from 25.0 to 75.0 s; pirate, sql"]


@pytest.mark.parametrize(
    ("adapters", "more", "said"),
    [
        ({"pirate": "sha-p"}, {}, " (pirate)"),
        ({"pirate": "sha-p", "sql": "sha-s"}, {}, ""),
        ({"pirate": "sha-p", "sql": "sha-s"}, {"is_selective": True, "adapter_id": "sha-s"}, " (sql)"),
        ({"pirate": "sha-p"}, {"is_selective": True}, ""),
        ({}, {}, ""),
    ],
)
def test_rows_that_moved_are_named_by_their_adapter_where_they_have_one(
    adapters: dict[str, str], more: dict[str, Any], said: str
) -> None:
    run = RunTimeline([track("v"), track("w")], [Move(1.0, 7, "v", "w", 3, **more)], end_s=9.0)
    titles = [r.data_source.data.get("title") for r in run_figures(run, {7: adapters}).select({"type": GlyphRenderer})]
    assert [f"3 rows of shard 7{said} from v to w"] in titles


def test_shards_that_are_open_together_stand_in_rows_of_their_own() -> None:
    spans = [ShardSpan(i, 0, 0.0, 10.0 + i, "committed") for i in range(3)]
    found = bars(run_figures(RunTimeline([track(spans=spans)], end_s=20.0), {}), "part written")
    assert sorted(found["bottom"])[:2] == sorted(found["top"])[1:]


def test_a_mode_is_as_high_as_its_share_of_the_batch() -> None:
    activities = [Activity("merged", 0.0, 5.0, 8.0), Activity("unmerged", 5.0, 9.0, 4.0)]
    figures = run_figures(RunTimeline([track(activities=activities)], end_s=9.0), {})
    heights = [bars(figures, mode)["bottom"][0] - bars(figures, mode)["top"][0] for mode in ("merged", "unmerged")]
    assert heights[0] == 2 * heights[1]


def test_modes_outcomes_and_idle_times_differ_by_more_than_colour() -> None:
    (run,) = read_timelines(lines(*busy_run()))
    figures = run_figures(run, {})
    modes = [figures.select_one({"name": mode}).glyph for mode in ("base", "unmerged", "merged", "mixture")]
    assert len({glyph.hatch_pattern for glyph in modes}) == 4


def test_many_shards_workers_and_moves_stay_a_bounded_picture() -> None:
    spans = [ShardSpan(i, 0, i * 0.001, i * 0.001 + 0.0005, "committed") for i in range(20_000)]
    moves = [Move(1.0, 1, "0", "1", 1)] * 5000
    tracks = [track(str(i), spans=spans if i == 0 else []) for i in range(200)]
    figures = run_figures(RunTimeline(tracks, moves, rates=[(i / 10_000, 1.0) for i in range(200_000)], end_s=20.0), {})
    assert len(bars(figures, "part written")["left"]) <= 401
    (timeline,) = figures.select({"name": "timeline"})
    # All 200 workers are there.
    assert (timeline.y_range.start, timeline.height) < (201, 20_000)
    assert len(timeline.yaxis.ticker.ticks) == 201
    assert all(len(source.data.get("s", ())) <= 401 for source in (r.data_source for r in timeline.renderers))


def test_the_throughput_of_a_long_run_is_thinned_to_means() -> None:
    run = RunTimeline([track()], rates=[(float(i), 10.0 * (i % 2)) for i in range(4000)], end_s=4000.0)
    rates = bars(run_figures(run, {}), "rates")
    assert set(rates["rate"]) == {5.0}
    assert rates["s"] == [10.0 * i for i in range(400)]


def test_both_figures_have_one_axis_of_seconds() -> None:
    throughput, timeline = run_figures(RunTimeline([track()], end_s=7.0), {}).children
    assert throughput.x_range is timeline.x_range
    assert isinstance(timeline.x_range, Range1d)
    assert (timeline.x_range.start, timeline.x_range.end) == (0.0, 7.0)


def test_workers_have_short_names_that_differ() -> None:
    addresses = ["tcp://127.0.0.1:4000", "tls://worker-0.namespace.svc.cluster.local:12345", "w"]
    names = worker_names(RunTimeline([track(address) for address in addresses], names=WorkerNames(addresses)))
    assert list(names.values()) == ["w0 127.0.0.1", "w1 worker-0", "w2 w"]


def test_bars_share_out_seconds_rows_pages_and_ways_to_adapters() -> None:
    assert adapter_figure(AdapterUse()) is None, "no step was seen"
    use = AdapterUse(
        pool_hits=6, loads=4, host_loads=3, step_s=10.0, stall_s=2.0, present_row_s=9.0, absent_row_s=1.0,
        page_s=100.0, adapter_page_s=30.0, row_page_s=50.0, prefix_page_s=5.0,
    )  # fmt: skip
    drawn = adapter_figure(use)
    assert drawn is not None
    (source,) = {renderer.data_source for renderer in drawn.select({"type": GlyphRenderer})}
    shares = dict(zip(zip(source.data["bar"], source.data["part"], strict=True), source.data["share"], strict=True))
    assert shares == {
        ("seconds of steps", "computing"): "80.0%",
        ("seconds of steps", "waiting for adapters"): "20.0%",
        ("row-seconds", "adapter there"): "90.0%",
        ("row-seconds", "adapter not there"): "10.0%",
        ("ways to an adapter", "in the pool"): "60.0%",
        ("ways to an adapter", "from host memory"): "30.0%",
        ("ways to an adapter", "from files"): "10.0%",
        ("page-seconds of the pool", "keys and values"): "50.0%",
        ("page-seconds of the pool", "adapters"): "30.0%",
        ("page-seconds of the pool", "prefix cache"): "5.0%",
        ("page-seconds of the pool", "free"): "15.0%",
    }
