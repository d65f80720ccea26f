from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.options.conditions import check_conditions, condition_met
from lorabatch.jobs.progress import AdapterCount, added_up
from lorabatch.jobs.spec import JobSpec

BASE = {"model": "m", "input": "i", "output": "o"}
COUNTS = [AdapterCount("", 50, 0, 500, 5), AdapterCount("a", 40, 2, 380, 0), AdapterCount("b", 10, 1, 9, 9)]


@pytest.mark.parametrize(
    ("condition", "clause"),
    [
        ("errors > 2%", "errors > 2%: 3 of 100 rows"),
        ("errors > 3%", ""),
        ("errors >= 3%", "errors >= 3%: 3 of 100 rows"),
        ("errors > 2", "errors > 2: 3 of 100 rows"),
        (" errors>2.5 % ", "errors>2.5 %: 3 of 100 rows"),
        ("errors > 9% in any adapter", "errors > 9% in any adapter: 1 of 10 rows of b"),
        ("errors > 10% in any adapter", ""),
        ("cut > 14%", "cut > 14%: 14 of 97 answers"),
        ("cut >= 100% in any adapter", "cut >= 100% in any adapter: 9 of 9 answers of b"),
        ("cut >= 10% in any adapter", "cut >= 10% in any adapter: 5 of 50 answers of the base model"),
        ("mean_tokens < 9.2", "mean_tokens < 9.2: 9.2"),
        ("mean_tokens <= 1 in any adapter", "mean_tokens <= 1 in any adapter: 1.0 of b"),
        ("mean_tokens > 10", ""),
    ],
)
def test_a_condition_is_checked_on_all_rows_or_on_those_of_each_adapter(condition, clause):
    assert check_conditions((condition,)) == (condition,)
    assert condition_met([condition], COUNTS) == clause


def test_the_first_condition_that_is_met_is_named_and_none_without_rows():
    assert condition_met(["errors > 50%", "cut > 3", "errors > 1"], COUNTS).startswith("cut > 3:")
    assert condition_met(["errors >= 0", "mean_tokens < 5"], []) == ""
    assert condition_met(["mean_tokens < 5"], [AdapterCount("a", 4, 4, 0)]) == ""


@pytest.mark.parametrize(
    "text",
    ["", "errors", "errors > ", "errors = 2%", "errors > -1", "errors > 101%", "errors > 2% or cut > 3", "tokens > 3",
     "mean_tokens > 5%", "errors > 2% in a", "errors > nan", "errors > 1e400", "__import__('os') > 2", "errors > 2%%"],
)  # fmt: skip
def test_a_condition_that_cannot_be_read_is_refused_with_what_is_allowed(text):
    with pytest.raises(JobRequestError, match="expected errors, cut or mean_tokens, then >, >=, < or <=") as refused:
        JobSpec(**BASE, stop_if=["errors > 2%", text])
    assert text[:40] in str(refused.value)


@given(st.text(max_size=40))
def test_no_text_ends_in_another_error(text):
    try:
        check_conditions((text,))
    except ValueError:
        return
    condition_met([text], COUNTS)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"confirm": True}, "confirm: what is to be confirmed are the answers of a canary"),
        ({"canary": 0}, "canary=0: expected at least 1"),
        ({"max_seconds": 0}, "max_seconds=0: expected greater than 0"),
        ({"max_seconds": "inf"}, "max_seconds='inf': expected a finite number"),
        ({"max_cost": "20 EUR"}, "max_cost='20 EUR': a cost needs the price of a worker's hour"),
        ({"max_cost": "20 EUR", "gpu_hour_price": "2 USD"}, "give both in one currency"),
        ({"max_cost": "cheap", "gpu_hour_price": "2"}, "max_cost='cheap': expected a number, 0 or more"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(options, problem):
    with pytest.raises(JobRequestError, match=problem):
        JobSpec(**BASE, **options)


def test_money_may_be_given_as_a_number_and_one_currency_is_enough():
    spec = JobSpec(**BASE, max_cost=20, gpu_hour_price="2.5 EUR", stop_if="errors > 2%")
    assert (spec.max_cost, spec.gpu_hour_price, spec.stop_if) == ("20", "2.5 EUR", ("errors > 2%",))


def test_counts_are_added_up():
    assert added_up("x", COUNTS) == AdapterCount("x", 100, 3, 889, 14)
