from __future__ import annotations

import numpy as np
import pytest

from lorabatch.benchmarks.simulation.draws import (
    bursty_arrivals,
    bursty_arrivals_per_adapter,
    draw_shifting,
    poisson_arrivals,
    top_five_popularity,
)


@pytest.mark.parametrize("popularity", [top_five_popularity(40), top_five_popularity(3)])
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


@pytest.mark.parametrize("arrivals", [poisson_arrivals, bursty_arrivals])
def test_arrivals_keep_their_rate(arrivals):
    release = arrivals(np.random.default_rng(0), 50_000, 10.0)
    assert (np.diff(release) >= 0).all()
    assert release[-1] == pytest.approx(5000, rel=0.1)


def test_bursts_are_burstier_than_poisson():
    gaps = [np.diff(a(np.random.default_rng(0), 20_000, 1.0)) for a in (poisson_arrivals, bursty_arrivals)]
    assert gaps[1].std() > 2 * gaps[0].std()


def test_each_adapter_has_bursts_and_lulls_of_its_own():
    adapter = np.repeat(np.arange(4, dtype=np.int32), 500)
    release = bursty_arrivals_per_adapter(np.random.default_rng(0), adapter, 20.0, cv=4.0)
    assert 0 <= release.min() <= release.max() <= 2000 / 20.0
    counts = np.array([np.histogram(release[adapter == k], bins=20, range=(0, 100))[0] for k in range(4)])
    # Poisson arrivals would vary by their root; adapters do not swing together.
    assert (counts.std(axis=1) > 2 * np.sqrt(counts.mean(axis=1))).all()
    assert np.abs(np.corrcoef(counts) - np.eye(4)).max() < 0.7
