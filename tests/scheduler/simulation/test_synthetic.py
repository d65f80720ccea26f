from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.simulation.synthetic import (
    bursty_arrivals,
    bursty_arrivals_per_adapter,
    draw_lengths,
    draw_shifting,
    make_adapters,
    make_workload,
    poisson_arrivals,
    power_popularity,
    top_five_popularity,
    uniform_popularity,
)


@pytest.mark.parametrize(
    "popularity", [uniform_popularity(40), power_popularity(40, 1.0), top_five_popularity(40), top_five_popularity(3)]
)
def test_popularities_sum_to_one_and_never_rise(popularity):
    assert popularity.sum() == pytest.approx(1.0)
    assert (np.diff(popularity) <= 1e-12).all()


def test_five_adapters_carry_70_percent():
    assert top_five_popularity(100)[:5].sum() == pytest.approx(0.7)


def test_popularity_shifts_from_one_end_to_the_other():
    first, last = np.array([0.9, 0.1]), np.array([0.1, 0.9])
    drawn = draw_shifting(np.random.default_rng(0), 20_000, first, last)
    assert (drawn[:2000] == 0).mean() > 0.8
    assert (drawn[-2000:] == 1).mean() > 0.8


def test_lengths_stay_in_range_around_their_median():
    drawn = draw_lengths(np.random.default_rng(0), 10_000, 100, 1.0, 500)
    assert (drawn.min() >= 1, drawn.max()) == (True, 500)
    assert np.median(drawn) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("arrivals", [poisson_arrivals, bursty_arrivals])
def test_arrivals_keep_their_rate(arrivals):
    release = arrivals(np.random.default_rng(0), 50_000, 10.0)
    assert (np.diff(release) >= 0).all()
    assert release[-1] == pytest.approx(5000, rel=0.1)


def test_bursts_are_burstier_than_poisson():
    gaps = [np.diff(a(np.random.default_rng(0), 20_000, 1.0)) for a in (poisson_arrivals, bursty_arrivals)]
    assert gaps[1].std() > 2 * gaps[0].std()


def test_a_synthetic_workload_is_sound():
    lengths = np.array([3, 8], np.int32)
    workload = make_workload(make_adapters([8, 64]), np.array([0, 1], np.int32), lengths, lengths)
    workload.check_integrity()
    assert workload.max_tokens.tolist() == [8, 8]
    assert workload.adapters[1].weight_bytes == 8 * workload.adapters[0].weight_bytes


def test_each_adapter_has_bursts_and_lulls_of_its_own():
    adapter = np.repeat(np.arange(4, dtype=np.int32), 500)
    release = bursty_arrivals_per_adapter(np.random.default_rng(0), adapter, 20.0, cv=4.0)
    assert 0 <= release.min() <= release.max() <= 2000 / 20.0
    counts = np.array([np.histogram(release[adapter == k], bins=20, range=(0, 100))[0] for k in range(4)])
    # Poisson arrivals would vary by their root; adapters do not swing together.
    assert (counts.std(axis=1) > 2 * np.sqrt(counts.mean(axis=1))).all()
    assert np.abs(np.corrcoef(counts) - np.eye(4)).max() < 0.7
