"""Estimates of how many tokens rows will generate."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorabatch.scheduler.estimates.lengths import (
    MIN_FINISHED_ROWS,
    AnswerLengths,
    AnswerModel,
    LengthDistribution,
    LengthEstimator,
    LengthsByPrompt,
    expected_tokens,
    length_class,
    spread_quantiles,
)


def test_before_any_row_has_finished_half_of_max_tokens_is_expected() -> None:
    lengths = LengthEstimator()
    assert lengths.mean() == 1.0
    lengths.asked(100)
    lengths.asked(300)
    assert lengths.mean() == 100.0
    assert LengthEstimator.of_rows(np.array([100, 300], np.int32), np.array([7, 9], np.int32)).mean() == 100.0


def test_many_finished_rows_outweigh_what_was_expected() -> None:
    lengths = LengthEstimator()
    lengths.asked(200)
    lengths.finished(1)
    assert 90 < lengths.mean() < 100
    lengths.finished(20_000, 2000)
    assert abs(lengths.mean() - 10) < 1


def test_prompts_are_those_of_rows_asked_for_less_what_finished_rows_reused() -> None:
    lengths = LengthEstimator()
    assert lengths.mean_prompt == 0.0
    lengths.asked(100, 2, prompt_tokens=600)
    assert lengths.mean_prompt == 300.0
    lengths.finished(50, 1, reused_tokens=0)
    lengths.finished(50, 1, reused_tokens=200)
    assert lengths.mean_prompt == 200.0
    lengths.finished(50, 1, reused_tokens=2000)
    assert lengths.mean_prompt == 0.0


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


def test_rows_that_still_run_make_lengths_longer_than_those_that_have_finished() -> None:
    """The first to finish are short: of 200 rows of 10 to 190 tokens all of up to 50 have finished."""
    lengths = LengthEstimator()
    finished = [tokens for tokens in range(10, 190) if tokens <= 50]
    for tokens in finished:
        lengths.finished(tokens)
    found = lengths.distribution(139, 50, 190).left()
    assert 60 < found < 130
    assert lengths.finished_mean == 30


def test_once_all_have_finished_the_mean_is_theirs() -> None:
    lengths = LengthEstimator()
    for tokens in range(10, 190):
        lengths.finished(tokens)
    found = lengths.distribution(0, 0, 190)
    assert found.left() == pytest.approx(100, rel=0.05)
    assert found.left(100) == pytest.approx(45, rel=0.1)


def test_nothing_known_is_half_of_the_limit() -> None:
    found = LengthEstimator().distribution(0, 0.0, 100)
    assert found.left() == pytest.approx(50, rel=0.01)
    assert found.left(60) == pytest.approx(20, rel=0.01)
    assert found.left(100) == 1.0


def test_known_groups_have_their_mean_and_their_longest() -> None:
    for mean, longest in ((10.0, 10.0), (10.0, 15.0), (10.0, 20.0), (10.0, 200.0)):
        found = LengthDistribution.of_groups([(50, mean, longest)])
        assert found.left() == pytest.approx(mean, rel=0.15), (mean, longest)
        assert found.steps_left(0, 0.0, 1e6, 1e6) <= longest + 0.5
    two = LengthDistribution.of_groups([(30, 10.0, 20.0), (10, 50.0, 100.0)])
    assert two.left() == pytest.approx(20, rel=0.15)


@pytest.mark.parametrize("num_rows", [5, 40, 400])
def test_steps_left_are_those_of_rows_played_one_by_one(num_rows: int) -> None:
    """Lengths spread evenly up to 200; mean of many batches, played step by step."""
    places, generator, steps = 16, np.random.default_rng(1), []
    for _ in range(60):
        ends = np.zeros(places)
        for length in generator.integers(1, 201, num_rows):
            ends[ends.argmin()] += length
        steps.append(ends.max())
    found = LengthEstimator().distribution(0, 0.0, 200)
    expected = found.steps_left(0, 0.0, num_rows, places)
    assert expected == pytest.approx(np.mean(steps), rel=0.12)


def by_prompt(finished: list[tuple[int, int]], asked: int, running: tuple[tuple[int, int], ...] = ()) -> float:
    """What a row with a prompt of so many tokens is expected to generate, beside pairs of prompt and output tokens."""
    lengths = LengthsByPrompt()
    for prompt, output in finished:
        lengths.finished(np.array([prompt]), np.array([output]))
    own, tokens = (np.array([pair[i] for pair in running], np.int64) for i in (0, 1))
    found = lengths.expected(np.array([asked]), np.array([1000]), own, tokens)
    assert found is not None
    return float(found[0])


def test_prompts_of_other_lengths_have_answers_of_other_lengths() -> None:
    finished = [(1000, 400)] * 100 + [(400, 100)] * 100
    assert 370 < by_prompt(finished, 1010) <= 400
    assert 100 <= by_prompt(finished, 390) < 115
    # Of a prompt like none before the mean of all is expected.
    assert by_prompt(finished, 5000) == 250


def test_one_answer_says_little_of_its_prompts_class() -> None:
    assert by_prompt([(400, 100)] * 50 + [(1000, 1000)], 1000) < 250


def test_rows_that_still_run_count_with_what_they_have_generated() -> None:
    """What finishes first is short."""
    finished = [(1000, 20)] * 10
    assert by_prompt(finished, 1000) == 20
    assert by_prompt(finished, 1000, running=((1000, 500),) * 10) > 200


def test_no_answer_is_expected_to_be_longer_than_its_limit() -> None:
    lengths = LengthsByPrompt()
    none = np.zeros(0, np.int64)
    assert lengths.expected(np.array([10]), np.array([5]), none, none) is None
    lengths.finished(np.array([10] * 40), np.array([300] * 40))
    found = lengths.expected(np.array([10, 10]), np.array([5, 1000]), none, none)
    assert found is not None
    assert found.tolist() == [5, 300]


@given(
    finished=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), min_size=1, max_size=30),
    asked=st.integers(0, 10**8),
)
def test_an_expected_length_lies_between_the_shortest_and_the_longest_answer(
    finished: list[tuple[int, int]], asked: int
) -> None:
    outputs = np.clip([output for _, output in finished], 1, 1000)
    found = by_prompt(finished, asked)
    assert min(1000, outputs.min()) * 0.999 <= found <= 1000


# Rows of an adapter: their number, tokens of each, and whether `max_tokens` ended them.
GROUPS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 3000), st.booleans()), min_size=1, max_size=12)


def answers(*groups: tuple[int, int, bool]) -> AnswerLengths:
    return AnswerLengths.of((rows, rows * tokens, is_cut) for rows, tokens, is_cut in groups)


def limits(*max_tokens: int) -> NDArray[np.int32]:
    return np.array(max_tokens, np.int32)


def test_answers_that_ended_by_themselves_have_the_mean_that_they_had() -> None:
    lengths = answers((3, 10, False), (1, 50, False), (2, 400, False))
    assert lengths.mean(limits(1000, 100, 20, 10)) == pytest.approx([880 / 6, 280 / 6, 15, 10])


def test_answers_that_were_cut_say_only_that_they_would_have_been_longer() -> None:
    """Kaplan-Meier: of four that reached 20 tokens, two were cut there, and of the others one ended at 40."""
    lengths = answers((4, 10, False), (2, 20, True), (1, 40, False), (1, 40, True))
    # Half end at 10, a quarter at 40, a quarter at any length from there to 100.
    assert lengths.mean(limits(100)) == pytest.approx([5 + 10 + 70 / 4])
    assert lengths.mean(limits(40)) == pytest.approx([5 + 20])
    # All were cut: any length from there on.
    assert answers((5, 16, True)).mean(limits(16, 116)) == pytest.approx([16, 66])


@given(GROUPS, st.integers(1, 4000))
def test_drawn_lengths_have_the_mean_that_is_expected_and_stay_within_max_tokens(
    groups: list[tuple[int, int, bool]], max_tokens: int
) -> None:
    model = AnswerModel(0.5, [answers(*groups), None])
    num_rows = 20_000
    most, adapter = np.full(num_rows, max_tokens, np.int32), np.zeros(num_rows, np.int32)
    drawn = model.drawn(most, adapter, spread_quantiles(np.arange(num_rows)))
    assert 1 <= drawn.min() <= drawn.max() <= max_tokens
    expected = model.mean(most, adapter)
    assert drawn.mean() == pytest.approx(expected[0], rel=0.01, abs=0.51)


@given(GROUPS)
def test_lengths_are_stored_whole(groups: list[tuple[int, int, bool]]) -> None:
    lengths = answers(*groups)
    assert AnswerLengths.from_json(json.loads(json.dumps(lengths.to_json()))) == lengths
    assert lengths.num_rows == sum(rows for rows, _, _ in groups)


def test_an_adapter_that_had_few_rows_is_expected_to_be_like_the_others() -> None:
    many, few = answers((1000, 20, False)), answers((4, 100, False))
    model = AnswerModel(0.5, [many, few, None, None])
    most, adapter = limits(1000, 1000, 1000, 1000), np.array([0, 1, 2, 3], np.int32)
    of_many, of_few, unknown, of_base = model.mean(most, adapter)
    assert of_many == pytest.approx(20, rel=0.05)
    assert of_few == pytest.approx((16 * 20 + 4 * 100) / 20, rel=0.05)
    assert (unknown, of_base) == (500, 500)


def test_few_answers_say_little_of_others() -> None:
    def expected(num_rows: int) -> float:
        return float(AnswerModel(0.5, [answers((num_rows, 10, False))]).mean(limits(1000), np.zeros(1, np.int32))[0])

    assert expected(1) > 200
    assert expected(1) > expected(4) > expected(16) > expected(64)
    assert expected(64) == pytest.approx(10, abs=1)


def test_rows_that_ask_for_nothing_have_no_answer() -> None:
    for earlier in (None, answers((9, 30, False))):
        model, adapter = AnswerModel(0.5, [earlier]), np.zeros(2, np.int32)
        assert model.mean(limits(0, 100), adapter)[0] == 0
        assert model.drawn(limits(0, 100), adapter, np.array([0.9, 0.9]))[0] == 0


def test_quantiles_of_any_stretch_of_rows_are_spread_evenly() -> None:
    """Also of every seventh row, and of rows far into the input."""
    for places in (np.arange(64), np.arange(0, 448, 7), np.arange(64) + (5 << 32)):
        ordered = np.sort(spread_quantiles(places))
        assert (ordered >= 0).all()
        assert (ordered < 1).all()
        assert np.diff(ordered, prepend=0, append=1).max() < 4 / 64


def test_what_earlier_jobs_answered_counts_until_rows_have_finished() -> None:
    lengths = LengthEstimator()
    lengths.had(answers((500, 20, False)), 1.0)
    assert lengths.distribution(0, 0, 1000).left() == pytest.approx(20, abs=60)
    assert lengths.distribution(0, 0, 1000).left() < LengthEstimator().distribution(0, 0, 1000).left() / 4
    lengths.finished(200 * 400, 400)
    assert lengths.distribution(0, 0, 1000).left() == pytest.approx(200, rel=0.15)
