"""Scores of completions by right answers, and right answers that nothing can be compared with."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.input.scores import problem_of_right, right_answers, score_of
from lorabatch.jobs.spec import ScoreBy

LABELS = (" good", " bad")


@pytest.mark.parametrize(
    ("score_by", "completion", "right", "score"),
    [
        ("exact", " Paris\n", "Paris", 1),
        ("exact", "Paris.", "Paris", 0),
        ("exact", "paris", "Paris", 0),
        ("exact", "42", 42, 1),
        ("exact", "b", ["a", None, "b"], 1),
        ("exact", "anything", None, None),
        ("exact", "anything", [], None),
        ("contains", "It is Paris.", "Paris", 1),
        ("contains", "It is Lyon.", ["Paris", "Lyon"], 1),
        ("contains", "It is Rome.", ["Paris", "Lyon"], 0),
        ("regex", "code 1234", r"\d{4}$", 1),
        ("regex", "code 123", r"\d{4}$", 0),
        ("json", '{"b": 2, "a": 1.0}', '{"a": 1, "b": 2}', 1),
        ("json", '```json\n{"a": 1}\n```', {"a": 1}, 1),
        ("json", '{"a": true}', '{"a": 1}', 0),
        ("json", '{"a": [1, {"b": null}]}', '{"a": [1, {"b": null}]}', 1),
        ("json", '{"a": 1, "c": 2}', '{"a": 1}', 0),
        ("json", "[1, 2]", [1, 2], 1),
        ("json", '{"a": 1', '{"a": 1}', 0),
        ("json", "[" * 100_000, "[]", 0),
        ("number", "So 3 + 4 = 1,007.50", "#### 1007.5", 1),
        ("number", "The answer is -3.", -3, 1),
        ("number", "The answer is 3.", -3, 0),
        ("number", "no number", 3, 0),
        ("number", "0.3000000001", 0.3, 1),
        ("number", "1e3", 1000, 1),
        ("choice", " good", "good", 1),
        ("choice", " good", 0, 1),
        ("choice", " bad", 0, 0),
    ],
)
def test_a_completion_is_compared_with_what_is_right(
    score_by: ScoreBy, completion: str, right: Any, score: float | None
) -> None:
    answers = right_answers(right, score_by)
    assert [problem_of_right(answer, score_by, LABELS) for answer in answers] == [None] * len(answers)
    assert score_of(completion, answers, score_by, LABELS) == score


@pytest.mark.parametrize(
    ("score_by", "right", "said"),
    [
        ("regex", "a(", "no regular expression"),
        ("regex", "(a{1000}){1000}", "no regular expression"),
        ("regex", "\ud800", "no regular expression"),
        ("json", '{"a"', "not JSON"),
        ("json", "NaN", "not JSON"),
        ("number", "none", "has no number"),
        ("choice", "great", "none of the texts"),
        ("choice", 2, "from 0 to 1"),
        ("choice", -1, "from 0 to 1"),
        ("exact", {"a": 1}, "expected text or a number"),
    ],
)
def test_a_right_answer_that_nothing_can_be_compared_with_is_named(score_by: ScoreBy, right: Any, said: str) -> None:
    problem = problem_of_right(right, score_by, LABELS)
    assert problem is not None
    assert problem.startswith("expected=")
    assert said in problem
    assert "Correct it" in problem


def test_a_choice_needs_a_choice() -> None:
    assert "no choice" in (problem_of_right("good", "choice", ()) or "")


def test_a_hostile_expression_takes_no_time() -> None:
    started_s = time.perf_counter()
    assert score_of("a" * 20_000, ["(a+)+$b"], "regex", ()) == 0
    assert time.perf_counter() - started_s < 5


@given(st.text(), st.text(min_size=1))
def test_a_text_that_is_contained_is_found_by_every_way_of_comparing_texts(before: str, right: str) -> None:
    if not right.strip() or not right.isprintable():
        return
    assert score_of(f"{before}{right.strip()}", [right], "contains", ()) == 1
    assert score_of(f" {right} ", [right], "exact", ()) == 1
