"""Conditions by which a job stops itself (`stop_if`): a closed list, read strictly and checked on counts of its rows.

errors > 2%                    error rows, of the rows that were counted
cut >= 50% in any adapter      answers that max_tokens cut off, of the answers of one adapter
errors > 20                    the same as numbers of rows
mean_tokens < 3                mean tokens of an answer
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping

from ...system.untrusted import shortened
from ..progress import AdapterCount, added_up

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_MEASURES = ("errors", "cut", "mean_tokens")
_ANY = "in any adapter"
_FORM = re.compile(
    rf"\s*(?P<measure>\w+)\s*(?P<operator>[<>]=?)\s*(?P<value>\d+(\.\d*)?|\.\d+)\s*(?P<percent>%?)\s*(?P<scope>{_ANY})?\s*"
)
_EXPECTED = (
    "expected errors, cut or mean_tokens, then >, >=, < or <=, then a number, for errors and cut also a percentage, "
    f"and '{_ANY}' if you like, such as 'errors > 2%' or 'cut > 90% {_ANY}'"
)


def check_conditions(conditions: tuple[str, ...]) -> tuple[str, ...]:
    """The conditions. Raises ValueError, with what is allowed, for one that cannot be read."""
    for text in conditions:
        _parsed(text)
    return conditions


def condition_met(conditions: Iterable[str], counts: Iterable[AdapterCount]) -> str:
    """A clause on the first condition that these rows meet, such as "errors > 2%: 3 of 64 rows"; "" when they meet
    none. `counts`: the rows by adapter; without any, no condition is met.
    """
    of_adapters = [count for count in counts if count.num_rows]
    for text in conditions if of_adapters else ():
        measure, compare, limit, is_share, is_any = _parsed(text)
        groups = of_adapters if is_any else [added_up("", of_adapters)]
        for count in groups:
            number, whole = _measured(measure, count)
            value = number / max(1, whole) if is_share or measure == "mean_tokens" else float(number)
            if whole and compare(value, limit):
                where = f" of {count.adapter or 'the base model'}" if is_any else ""
                found = f"{value:.1f}" if measure == "mean_tokens" else f"{number:,} of {whole:,} {_NOUNS[measure]}"
                return f"{' '.join(text.split())}: {found}{where}"
    return ""


_NOUNS = {"errors": "rows", "cut": "answers"}


def _parsed(text: str) -> tuple[str, Callable[[float, float], bool], float, bool, bool]:
    """Measure, comparison, limit, whether the limit is a share, and whether any adapter alone meets the condition."""
    found = _FORM.fullmatch(text)
    if found is None or found["measure"] not in _MEASURES or (found["percent"] and found["measure"] == "mean_tokens"):
        raise ValueError(f"{shortened(repr(text), 60)}: {_EXPECTED}")
    value, is_share = float(found["value"]), bool(found["percent"])
    if not math.isfinite(value) or (is_share and value > 100):
        raise ValueError(f"{shortened(repr(text), 60)}: {_EXPECTED}")
    limit = value / 100 if is_share else value
    return found["measure"], _OPERATORS[found["operator"]], limit, is_share, found["scope"] is not None


def _measured(measure: str, count: AdapterCount) -> tuple[int, int]:
    """A number, and the number of rows or answers of which it is a part or the sum."""
    answers = count.num_rows - count.num_errors
    if measure == "errors":
        return count.num_errors, count.num_rows
    return (count.num_cut, answers) if measure == "cut" else (count.completion_tokens, answers)
