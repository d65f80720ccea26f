from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.simulation.synthetic import draw_lengths, make_adapters, make_workload, power_popularity


@pytest.mark.parametrize("popularity", [power_popularity(40, 0.0), power_popularity(40, 1.0)])
def test_popularities_sum_to_one_and_never_rise(popularity):
    assert popularity.sum() == pytest.approx(1.0)
    assert (np.diff(popularity) <= 1e-12).all()


def test_lengths_stay_in_range_around_their_median():
    drawn = draw_lengths(np.random.default_rng(0), 10_000, 100, 1.0, 500)
    assert (drawn.min() >= 1, drawn.max()) == (True, 500)
    assert np.median(drawn) == pytest.approx(100, rel=0.1)


def test_a_synthetic_workload_is_sound():
    lengths = np.array([3, 8], np.int32)
    workload = make_workload(make_adapters([8, 64]), np.array([0, 1], np.int32), lengths, lengths)
    workload.check_integrity()
    assert workload.max_tokens.tolist() == [8, 8]
    assert workload.adapters[1].weight_bytes == 8 * workload.adapters[0].weight_bytes
