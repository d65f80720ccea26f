"""Reports of one engine: rates, restarts, and rows counted once."""

from __future__ import annotations

import json
from dataclasses import replace

import msgpack
import pytest

from lorabatch.engine.adapter_use import AdapterUse
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.pipeline.messages import WorkerReport
from lorabatch.pipeline.supervisor.metrics import EngineMeter
from lorabatch.pipeline.supervisor.open_shard import OpenShard
from lorabatch.scheduler.messages import FinishedRows
from lorabatch.system.codec import from_plain, to_plain

SNAPSHOT = EngineTelemetry(
    num_running=3,
    resident_adapter_ids=("sha-a",),
    mode="unmerged",
    pages_used=7,
    pages_total=9,
    prompt_tokens=100,
    generated_tokens=50,
    num_steps=5,
    reused_prompt_tokens=300,
    adapters=AdapterUse(loads=2, stall_s=0.5),
)


def test_a_run_gets_its_share_of_what_the_engine_does() -> None:
    meter = EngineMeter("tcp://w", batch_rows=8, now_s=0.0)
    meter.process_started(1, 10.0)
    meter.progressed(SNAPSHOT, 12.0)
    whole, third = meter.report([]), meter.report([], share=1 / 3)
    assert (whole.telemetry.num_running, third.telemetry.num_running) == (3, 1)
    assert third.tokens_per_s == pytest.approx(whole.tokens_per_s / 3)
    assert third.telemetry.pages_used == whole.telemetry.pages_used


def test_rates_count_from_the_start_of_the_process_that_runs_now() -> None:
    meter = EngineMeter("tcp://w", batch_rows=8, now_s=0.0)
    meter.process_started(1, 10.0)
    meter.progressed(SNAPSHOT, 12.0)
    assert meter.latest.tokens_per_s == 25.0
    latest = meter.latest.telemetry
    assert (latest.prefix_hit_rate, latest.adapters.loads, latest.adapters.stall_s) == (0.75, 2, 0.5)
    meter.process_died("it was killed by signal 9")
    assert (meter.latest.state, meter.latest.tokens_per_s, meter.latest.num_crashes) == ("restarting", 0.0, 1)
    assert meter.latest.telemetry.resident_adapter_ids == ()
    meter.process_started(2, 20.0)
    meter.progressed(SNAPSHOT, 25.0)
    assert meter.latest.tokens_per_s == 10.0
    assert meter.latest.engine_pid == 2


def test_a_rate_is_over_half_a_second_or_more_though_snapshots_come_at_once() -> None:
    """A worker that was held up for seconds reads the snapshots of that time within a millisecond."""
    meter = EngineMeter("tcp://w", batch_rows=8, now_s=0.0)
    meter.process_started(1, 10.0)
    rates = []
    for number, now_s in enumerate((11.0, 12.0, 15.0, 15.0, 15.001, 15.002, 16.0), start=1):
        meter.progressed(replace(SNAPSHOT, generated_tokens=50 * number, prompt_tokens=100 * number), now_s)
        rates.append((meter.latest.tokens_per_s, meter.latest.prompt_tokens_per_s))
    per_snapshot = pytest.approx(50 / 3), pytest.approx(100 / 3)
    assert rates == [(50.0, 100.0), (50.0, 100.0), *[per_snapshot] * 4, (200.0, 400.0)]
    assert meter.latest.telemetry.generated_tokens == 350


def test_steps_fill_seconds_by_their_share_and_all_seconds_count() -> None:
    meter = EngineMeter("tcp://w", batch_rows=8, now_s=90.0)
    meter.process_started(1, 100.0)
    meter.progressed(replace(SNAPSHOT, num_steps=10, filled_steps=7.5, busy_s=1.5), 102.0)
    assert (meter.latest.filled_s, meter.latest.elapsed_s) == (0.75 * 1.5, 2.0)
    meter.progressed(replace(SNAPSHOT, num_steps=10, filled_steps=7.5, busy_s=1.5), 103.0)
    assert (meter.latest.filled_s, meter.latest.elapsed_s) == (0.75 * 1.5, 3.0)
    meter.process_started(2, 110.0)
    meter.progressed(replace(SNAPSHOT, num_steps=4, filled_steps=4.0, busy_s=1.0), 111.0)
    assert (meter.latest.filled_s, meter.latest.elapsed_s) == (0.75 * 1.5 + 1.0, 4.0)


def test_a_report_survives_the_way_through_dask() -> None:
    meter = EngineMeter("tcp://w", batch_rows=8, now_s=0.0)
    meter.process_started(1, 10.0)
    meter.progressed(SNAPSHOT, 12.0)
    shard = OpenShard(4, [ExportedRow(Request("r", (1,), None, SamplingParams()))], "run")
    report = meter.report([shard], (FinishedRows("sha-a", 1, 5),))
    assert report.open_rows == 1
    assert from_plain(WorkerReport, msgpack.unpackb(msgpack.packb(to_plain(report)))) == report
    assert from_plain(WorkerReport, json.loads(json.dumps(to_plain(report)))) == report
