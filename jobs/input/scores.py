"""Scores a completion by the right answers of its row: 1 if one of them is met, else 0.

Right answers come from a column of the input, so that they are as untrusted as prompts: regular expressions are matched
by RE2, whose time grows with the text only, and JSON is read with the limits of `parse_json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...system.untrusted import MALFORMED, parse_json, shown
from ..spec import ScoreBy

# A number in a text, with commas between thousands.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")
_FENCE = re.compile(r"\s*```[a-zA-Z]*\n(.*?)\n?```\s*", re.DOTALL)
# Largest relative difference of equal numbers.
_TOLERANCE = 1e-6


def right_answers(value: Any, score_by: ScoreBy) -> list[Any]:
    """The right answers that a column has for a row; none for null. A list has several of them, unless answers are
    compared as JSON and the list is one: a list of texts has the JSON of several.
    """
    if value is None:
        return []
    is_several = isinstance(value, list) and (score_by != "json" or all(isinstance(one, str) for one in value))
    return [one for one in value if one is not None] if is_several else [value]


def problem_of_right(answer: Any, score_by: ScoreBy, choice: Sequence[str]) -> str | None:
    """Why nothing can be compared with this right answer, as a sentence; None if answers can be. `choice`: texts that
    the row's answer is one of.
    """
    problem = _PROBLEMS[score_by](answer, choice) if score_by in _PROBLEMS else None
    if problem is None and score_by != "json" and not isinstance(answer, str | int | float):
        problem = "expected text or a number"
    if problem is None:
        return None
    return f"expected={shown(answer)}: {problem}. Correct it, or leave it null for a row without a score."


def score_of(completion: str, right: Sequence[Any], score_by: ScoreBy, choice: Sequence[str]) -> float | None:
    """1 if a right answer is met, else 0; None where no answer is right. `choice`: as in `problem_of_right`."""
    if not right:
        return None
    return float(any(_IS_MET[score_by](completion, answer, choice) for answer in right))


def _text(answer: Any) -> str:
    return str(answer).strip()


def _is_exact(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    return completion.strip() == _text(answer)


def _contains(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    return _text(answer) in completion


def _matches(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    return bool(pc.match_substring_regex(pa.scalar(completion), str(answer)).as_py())


def _is_same_json(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    fenced = _FENCE.fullmatch(completion)
    try:
        found = _parsed(fenced[1] if fenced else completion)
        return _are_equal(found, _parsed(answer) if isinstance(answer, str) else answer)
    except MALFORMED:
        return False


def _parsed(text: str) -> Any:
    """The value of a JSON text. Raises an error of `MALFORMED`, also for NaN and infinities, which JSON has not."""
    return parse_json(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal. 1 is 1.0, and true is no number."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _is_same_number(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    found, right = _last_number(completion), _last_number(str(answer))
    return found is not None and right is not None and math.isclose(found, right, rel_tol=_TOLERANCE, abs_tol=1e-9)


def _is_chosen(completion: str, answer: Any, choice: Sequence[str]) -> bool:
    right = choice[answer] if isinstance(answer, int) else answer
    return completion.strip() == right.strip()


_IS_MET: Mapping[ScoreBy, Callable[[str, Any, Sequence[str]], bool]] = {
    "exact": _is_exact,
    "contains": _contains,
    "regex": _matches,
    "json": _is_same_json,
    "number": _is_same_number,
    "choice": _is_chosen,
}


def _regex_problem(answer: Any, choice: Sequence[str]) -> str | None:
    try:
        pc.match_substring_regex(pa.scalar(""), str(answer))
    except (pa.ArrowInvalid, UnicodeEncodeError) as error:
        return f"no regular expression of RE2 ({str(error).splitlines()[0]})"
    return None


def _json_problem(answer: Any, choice: Sequence[str]) -> str | None:
    if not isinstance(answer, str):
        return None
    try:
        _parsed(answer)
    except MALFORMED as error:
        return f"not JSON ({str(error) or type(error).__name__})"
    return None


def _number_problem(answer: Any, choice: Sequence[str]) -> str | None:
    return "has no number" if _last_number(str(answer)) is None else None


def _choice_problem(answer: Any, choice: Sequence[str]) -> str | None:
    if not choice:
        return "the row has no choice of texts"
    if isinstance(answer, int):
        return None if 0 <= answer < len(choice) else f"expected the number of a text, from 0 to {len(choice) - 1}"
    is_listed = isinstance(answer, str) and answer.strip() in [text.strip() for text in choice]
    return None if is_listed else "none of the texts of the row's choice"


_PROBLEMS: Mapping[ScoreBy, Callable[[Any, Sequence[str]], str | None]] = {
    "regex": _regex_problem,
    "json": _json_problem,
    "number": _number_problem,
    "choice": _choice_problem,
}
