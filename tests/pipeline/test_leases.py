"""Who coordinates: one attempt at a time, whoever wakes up, and nobody is replaced who was heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.leases import Leases


def test_a_coordinator_that_renews_keeps_its_lease() -> None:
    leases = Leases(0.0)
    attempt = leases.take("run", 20.0, 0.0)
    for second in range(60):
        assert leases.renew("run", attempt, float(second))
        assert leases.lapsed(float(second)) == []


def test_one_that_is_silent_is_named_once_it_was_silent_for_its_limit() -> None:
    leases = Leases(0.0)
    leases.take("short", 5.0, 0.0)
    leases.take("long", 50.0, 0.0)
    assert [leases.lapsed(float(second)) for second in (3, 5, 6)] == [[], [], ["short"]]


def test_who_was_replaced_is_told_so_even_before_the_next_one_has_begun() -> None:
    leases = Leases(0.0)
    first = leases.take("run", 5.0, 0.0)
    leases.pass_on("run", 6.0)
    assert not leases.renew("run", first, 6.5)
    assert leases.lapsed(10.0) == []
    second = leases.take("run", 5.0, 10.0)
    assert leases.renew("run", second, 11.0)
    assert not leases.renew("run", first, 11.0)


def test_a_second_coordinator_ends_the_first() -> None:
    leases = Leases(0.0)
    first, second = (leases.take("run", 5.0, 0.0) for _ in range(2))
    assert not leases.renew("run", first, 1.0)
    assert leases.renew("run", second, 1.0)


def test_who_slept_blames_nobody_for_its_own_sleep() -> None:
    leases = Leases(0.0)
    leases.take("run", 5.0, 0.0)
    assert leases.lapsed(1.0) == []
    assert leases.lapsed(1000.0) == []
    assert leases.lapsed(1003.0) == []
    assert leases.lapsed(1006.0) == ["run"]


def test_an_ended_run_is_held_by_nobody() -> None:
    leases = Leases(0.0)
    attempt = leases.take("run", 5.0, 0.0)
    leases.end("run")
    assert not leases.renew("run", attempt, 1.0)
    assert leases.lapsed(5.0) == []


@given(st.lists(st.tuples(st.sampled_from(["take", "renew", "pass_on"]), st.integers(0, 4)), max_size=40))
def test_at_most_one_attempt_holds_a_run_and_it_is_the_latest(steps: list[tuple[str, int]]) -> None:
    leases = Leases(0.0)
    attempts = [leases.take("run", 5.0, 0.0)]
    is_passed_on = False
    for step, which in steps:
        match step:
            case "take":
                attempts.append(leases.take("run", 5.0, 0.0))
                is_passed_on = False
            case "pass_on":
                leases.pass_on("run", 0.0)
                is_passed_on = True
            case _:
                attempt = attempts[which % len(attempts)]
                assert leases.renew("run", attempt, 0.0) == (attempt == attempts[-1] and not is_passed_on)
    assert len(set(attempts)) == len(attempts)
