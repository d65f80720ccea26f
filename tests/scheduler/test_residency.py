from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.residency import AdapterTooLargeError, furthest_next_use, plan_residency, prefetch

ONE_EACH = dict.fromkeys("abcdef", 1)


def loads(steps):
    return sum(len(step.load) for step in steps)


def fewest_loads(uses, capacity):
    """Brute force over every choice of victim."""

    def rest(index, present):
        if index == len(uses):
            return 0
        need = uses[index]
        if need in present:
            return rest(index + 1, present)
        if len(present) < capacity:
            return 1 + rest(index + 1, present | {need})
        return 1 + min(rest(index + 1, (present - {victim}) | {need}) for victim in present)

    return rest(0, frozenset())


def test_the_textbook_sequence():
    steps = plan_residency([[x] for x in "abcabdab"], ONE_EACH, 3)
    assert loads(steps) == 4
    assert steps[5].evict == ("c",)


def test_what_is_never_used_again_goes_first():
    assert furthest_next_use(["a", "b"], {"a": [5], "b": [1]}, now=2) == "b"


def test_adapters_already_there_are_not_loaded():
    (step,) = plan_residency([["a", "b"]], ONE_EACH, 2, resident=["a"])
    assert step.load == ("b",)


def test_big_adapters_push_out_as_many_as_needed():
    steps = plan_residency([["a"], ["b"], ["f"]], ONE_EACH | {"f": 2}, 2)
    assert sorted(steps[2].evict) == ["a", "b"]


def test_a_use_that_cannot_fit_is_named():
    with pytest.raises(AdapterTooLargeError, match="use 0 needs a, b at once: 2 bytes, but adapters may take 1"):
        plan_residency([["a", "b"]], ONE_EACH, 1)


def test_the_next_uses_adapters_are_fetched_as_far_as_they_fit():
    steps = plan_residency([["a"], ["b", "c"]], ONE_EACH, 3)
    assert prefetch(steps, 0, 2, ONE_EACH) == ("b", "c")
    assert prefetch(steps, 0, 1, ONE_EACH) == ("b",)
    assert prefetch(steps, 1, 5, ONE_EACH) == ()


@settings(deadline=None, max_examples=60)
@given(st.text("abcde", max_size=9), st.integers(1, 4))
def test_no_order_of_evictions_loads_less(uses, capacity):
    assert loads(plan_residency(list(uses), ONE_EACH, capacity)) == fewest_loads(uses, capacity)
