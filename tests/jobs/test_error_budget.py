"""Counts and shares of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.error_budget import ErrorBudget


@pytest.mark.parametrize(
    ("text", "num_rows", "limit"),
    [("10%", 100, 10), ("10%", 9, 0), ("10%", 10, 1), ("0", 50, 0), ("7", 3, 7), ("100%", 3, 3), ("0.1%", 2000, 2)],
)
def test_the_limit_is_a_count_or_a_share_rounded_down(text: str, num_rows: int, limit: int) -> None:
    budget = ErrorBudget.parse(text)
    assert budget.limit(num_rows) == limit
    assert budget.allows(limit, num_rows)
    assert not budget.allows(limit + 1, num_rows)


@pytest.mark.parametrize("text", ["", "%", "ten", "-1", "101%", "-5%", "1.5", "nan%"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="expected a count of rows such as 25, or a share of them such as 10%"):
        ErrorBudget.parse(text)


@given(percent=st.integers(0, 100), hundreds=st.integers(0, 10**6))
def test_whole_percentages_of_round_numbers_are_exact(percent: int, hundreds: int) -> None:
    assert ErrorBudget.parse(f"{percent}%").limit(hundreds * 100) == percent * hundreds
