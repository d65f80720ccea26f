from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.demand import LengthModel, extrapolate
from lorabatch.scheduler.workload import AdapterInfo, Workload


def make_workload(adapter_index, max_tokens):
    num_rows = len(adapter_index)
    return Workload(
        adapters=(AdapterInfo("short", 8, 1), AdapterInfo("long", 8, 1)),
        adapter_index=np.asarray(adapter_index, np.int32),
        prompt_tokens=np.full(num_rows, 10, np.int32),
        max_tokens=np.asarray(max_tokens, np.int32),
        prefix_hash=np.zeros(num_rows, np.uint64),
    )


def test_before_anything_finished_a_row_uses_half_its_limit():
    model = LengthModel(["short", "long"])
    assert model.predict(make_workload([0, 1, -1], [100, 200, 300])).tolist() == [50, 100, 150]


def test_finished_rows_correct_their_adapter():
    model = LengthModel(["short", "long"])
    model.observe([("short", 1, 20)] * 100 + [("long", 1, 400)] * 100)
    short, long = model.predict(make_workload([0, 1], [1000, 1000]))
    assert short == pytest.approx(20, rel=0.2)
    assert long == pytest.approx(400, rel=0.2)


def test_an_adapter_nobody_has_seen_borrows_from_the_others():
    model = LengthModel(["short", "long"])
    model.observe([("short", 1, 20)] * 100)
    assert model.predict(make_workload([1, -1], [1000, 1000])) == pytest.approx([20, 20], rel=0.2)


def test_a_prediction_never_exceeds_the_rows_limit():
    model = LengthModel(["short", "long"])
    model.observe([("long", 10, 4000)])
    assert model.predict(make_workload([1], [64])).tolist() == [64]


def test_high_quantiles_lie_above_low_ones():
    model = LengthModel(["short", "long"])
    model.observe([("long", 1, tokens) for tokens in range(10, 1000)])
    low, middle, high = (model.quantiles(q)[1] for q in (0.1, 0.5, 0.9))
    assert low < middle < high
    assert middle == pytest.approx(500, rel=0.2)


def test_a_bucket_of_rows_counts_as_that_many_rows():
    one_by_one, together = LengthModel(["a"]), LengthModel(["a"])
    one_by_one.observe([("a", 1, 50)] * 8)
    together.observe([("a", 8, 400)])
    assert one_by_one.num_finished == together.num_finished == 8
    assert one_by_one.quantiles(0.5) == pytest.approx(together.quantiles(0.5))


def test_unknown_names_are_ignored():
    model = LengthModel(["a"])
    model.observe([("somebody else", 5, 100)])
    assert model.num_finished == 0


def test_one_time_step_is_repeated():
    assert extrapolate([[3.0, 5.0]]).tolist() == [3.0, 5.0]


def test_a_steady_rise_goes_on():
    assert extrapolate([[10, 8], [20, 8], [30, 8]]) == pytest.approx([40, 8])


def test_a_fall_stops_at_zero():
    assert extrapolate([[30.0], [15.0], [0.0]]).tolist() == [0.0]
