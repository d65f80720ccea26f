"""Expressions of stages: a closed language over the values of a row."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.options.expression import Expression

SCOPE: dict[str, Any] = {
    "priority": 3,
    "body": "where is my parcel",
    "draft": [{"completion": "a", "by": 1.5}, {"completion": "b", "by": None}, None],
    "judge": {"choice": "good", "probability": {"good": 0.75, "very bad": 0.25}, "error": None},
    "skipped": None,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("priority > 2", True),
        ("1 < priority <= 3", True),
        ("priority > 2 and judge.choice == 'good'", True),
        ("not judge.choice == 'good' or priority == 4", False),
        ("judge.probability.good - judge.probability['very bad']", 0.5),
        ("-priority * 2 + 1", -5),
        ("priority / 0", None),
        ("'parcel' in body", True),
        ("judge.choice in ['good', 'fair']", True),
        ("judge.choice not in ('bad',)", True),
        ("draft.completion", ["a", "b", None]),
        ("draft[0].completion", "a"),
        ("draft[-1]", None),
        ("draft[7].completion", None),
        ("draft.completion == 'b'", [False, True, False]),
        ("any(draft.completion == 'b')", True),
        ("all(draft.by > 1)", False),
        ("len(draft)", 3),
        ("len(body) > 5", True),
        ("len(priority)", None),
        ("skipped.by < 0.7", False),
        ("skipped.by > 0.7", False),
        ("skipped.by + 1", None),
        ("skipped is None", True),
        ("judge is not None", True),
        ("judge.error == None", False),
        ("body < 3", False),
        ("nothing.at.all", None),
    ],
)
def test_the_value_of_an_expression(text: str, expected: Any) -> None:
    assert Expression(text).value(SCOPE) == expected


@pytest.mark.parametrize(
    ("text", "is_true"), [("draft.by > 1", False), ("priority", True), ("skipped", False), ("[]", False), ("[1]", True)]
)
def test_a_list_is_true_when_all_of_it_is(text: str, is_true: bool) -> None:
    assert Expression(text).is_true(SCOPE) is is_true


def test_the_names_that_an_expression_reads() -> None:
    assert Expression("best.by < 0.7 and any(judge.choice == other['x'])").names == ("best", "judge", "other")


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "x := 3", "lambda: 1", "[x for x in y]", "x()", "open('f')", "x.y()", "len(a, b)", "any(*a)",
        "__import__('os')", "x if y else z", "f'{x}'", "x ** 9", "x << 9", "x @ y", "x; y", "import os", "await x",
        "{'a': 1}", "x[y]", "x[1:2]", "b'x'", "...", "1j", "x" * 2001, "+".join(["x"] * 400),
        "(" * 250 + "x" + ")" * 250,
    ],
)  # fmt: skip
def test_what_is_not_in_the_language_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as best\.by|expected at most|more than") as refused:
        Expression(text)
    assert len(str(refused.value)) < 600


@given(st.text(st.sampled_from(string.printable), max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        expression = Expression(text)
    except ValueError:
        return
    expression.is_true(SCOPE)
    expression.is_true({})
