"""A hung worker is noticed by its silence, and is back as soon as it speaks."""

from __future__ import annotations

from lorabatch.pipeline.roll_call import SILENCE_LIMIT_S, RollCall

STEP_S = 2


def silent_after(roll: RollCall, workers: set[str], from_s: int, to_s: int, speaking: str | None = None) -> set[str]:
    """Who is silent at the end, when all of this time the roll was called and `speaking` answered."""
    silent: set[str] = set()
    for now_s in range(from_s, to_s + 1, STEP_S):
        if speaking:
            roll.heard(speaking, float(now_s))
        silent = roll.silent(workers, float(now_s))
    return silent


def test_who_does_not_speak_is_silent_after_a_while_and_others_are_not() -> None:
    roll = RollCall(0.0)
    limit_s = int(SILENCE_LIMIT_S)
    assert silent_after(roll, {"a", "b"}, 0, limit_s, speaking="a") == set()
    assert silent_after(roll, {"a", "b"}, limit_s + STEP_S, limit_s + STEP_S, speaking="a") == {"b"}
    roll.heard("b", limit_s + 3.0)
    assert roll.silent({"a", "b"}, limit_s + 4.0) == set()


def test_a_worker_that_left_and_comes_back_starts_anew() -> None:
    roll = RollCall(0.0)
    assert silent_after(roll, {"a"}, 0, 10) == set()
    assert silent_after(roll, set(), 12, 40) == set()
    assert silent_after(roll, {"a"}, 42, 44) == set()


def test_a_caller_that_slept_itself_blames_nobody_before_it_has_listened_again() -> None:
    roll = RollCall(0.0)
    assert silent_after(roll, {"a"}, 0, 10) == set()
    assert roll.silent({"a"}, 300.0) == set()
    assert silent_after(roll, {"a"}, 302, 308) == set()
    assert silent_after(roll, {"a"}, 310, 330) == {"a"}
