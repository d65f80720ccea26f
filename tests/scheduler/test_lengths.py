"""Estimates of how many tokens rows will generate."""

from __future__ import annotations

import numpy as np

from lorabatch.scheduler.lengths import MIN_FINISHED_ROWS, LengthEstimator, expected_tokens


def test_before_any_row_has_finished_half_of_max_tokens_is_expected() -> None:
    lengths = LengthEstimator()
    assert lengths.mean() == 1.0
    lengths.asked(100)
    lengths.asked(300)
    assert lengths.mean() == 100.0
    assert LengthEstimator.of_rows(np.array([100, 300], np.int32)).mean() == 100.0


def test_many_finished_rows_outweigh_what_was_expected() -> None:
    lengths = LengthEstimator()
    lengths.asked(200)
    lengths.finished(1)
    assert 90 < lengths.mean() < 100
    lengths.finished(20_000, 2000)
    assert abs(lengths.mean() - 10) < 1


def test_an_adapter_is_measured_once_enough_of_its_rows_have_finished() -> None:
    lengths = LengthEstimator()
    lengths.finished(20 * (MIN_FINISHED_ROWS - 1), MIN_FINISHED_ROWS - 1, "x")
    assert lengths.measured("x") is None
    lengths.finished(20, 1, "x")
    assert lengths.measured("x") == 20.0
    assert lengths.measured("y") is None


def test_adapters_together_are_the_mean_of_those_that_were_measured() -> None:
    lengths = LengthEstimator()
    assert lengths.measured_together(["x", "y"]) is None
    lengths.finished(20 * 8, 8, "x")
    lengths.finished(40 * 8, 8, "y")
    lengths.finished(60 * 8, 8)
    assert lengths.measured_together(["x", "y", "never seen"]) == 30.0
    assert lengths.measured_together([]) == 60.0


def test_a_share_of_the_limit_is_expected_at_least_one_token_and_none_of_error_rows() -> None:
    limits = np.array([100, 1, 0], np.int32)
    assert expected_tokens(limits).tolist() == [50.0, 1.0, 0.0]
    assert expected_tokens(limits, 1.0).tolist() == [100.0, 1.0, 0.0]
