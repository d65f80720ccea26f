"""Estimates of how many tokens rows will generate."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.scheduler.estimates.lengths import MIN_FINISHED_ROWS, LengthEstimator, expected_tokens, length_class


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


def test_a_row_of_which_nothing_is_known_has_half_of_the_rest_to_go() -> None:
    assert LengthEstimator().left(0, 100) == 50.0
    assert LengthEstimator().left(60, 100) == 20.0
    assert LengthEstimator().left(200, 100) == 1.0


def test_where_lengths_are_long_tailed_a_row_that_has_run_long_runs_on() -> None:
    lengths = LengthEstimator()
    for tokens, rows in ((20, 900), (800, 100)):
        lengths.finished(tokens * rows, rows)
    assert 90 < lengths.left(0, 1000) < 115
    assert 450 < lengths.left(200, 1000) < 620


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 50)), max_size=30), st.integers(0, 2000))
def test_what_is_left_is_positive_and_within_what_was_seen(finished: list[tuple[int, int]], generated: int) -> None:
    lengths = LengthEstimator()
    for tokens, rows in finished:
        lengths.finished(tokens * rows, rows)
    left = lengths.left(generated, 2000)
    assert 1.0 <= left <= 2000


@given(st.integers(1, 1 << 24))
def test_lengths_that_differ_by_less_than_a_fifth_are_of_the_same_class_or_the_next(tokens: int) -> None:
    assert length_class(tokens) <= length_class(tokens * 1.18) <= length_class(tokens) + 1
