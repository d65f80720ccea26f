from __future__ import annotations

from lorabatch.scheduler.scaling import ScalingSettings, wanted_workers

SETTINGS = ScalingSettings(batches_per_worker=4.0)


def test_a_worker_for_each_four_batches():
    assert wanted_workers(256, 64, 1, SETTINGS) == 1
    assert wanted_workers(257, 64, 1, SETTINGS) == 2
    assert wanted_workers(10_000, 64, 3, SETTINGS) == 40


def test_a_job_keeps_one_worker_to_its_end_and_no_job_needs_none():
    assert wanted_workers(0, 64, 1, SETTINGS) == 1
    assert wanted_workers(500, 64, 0, SETTINGS) == 0
