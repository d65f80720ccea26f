"""The detector of silent processes, with times made up."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from lorabatch.scheduler.liveness import LivenessDetector

LIMIT_S = 20


@pytest.fixture
def detector() -> LivenessDetector:
    """With the limits of a coordinator's workers."""
    return LivenessDetector(float(LIMIT_S), 6.0, 0.0)


def look(detector: LivenessDetector, names: Collection[str], from_s: int, to_s: int, speaking: str = "") -> list[str]:
    """What is silent at the end, after a look every other second at which `speaking` were heard."""
    silent: list[str] = []
    for now_s in range(from_s, to_s + 1, 2):
        for name in speaking:
            detector.heard(name, float(now_s))
        silent = detector.silent(names, float(now_s))
    return silent


def test_only_a_process_that_was_not_heard_for_the_limit_is_silent(detector: LivenessDetector) -> None:
    assert look(detector, "ab", 0, LIMIT_S, speaking="a") == []
    assert look(detector, "ab", LIMIT_S + 2, LIMIT_S + 2, speaking="a") == ["b"]


def test_a_silent_process_that_is_heard_again_is_alive(detector: LivenessDetector) -> None:
    assert look(detector, "b", 0, 22) == ["b"]
    detector.heard("b", 23.0)
    assert detector.silent("b", 24.0) == []


def test_silence_of_a_forgotten_process_starts_anew(detector: LivenessDetector) -> None:
    look(detector, "a", 0, 10)
    detector.forget("a")
    assert look(detector, "", 12, 40) == []
    assert look(detector, "a", 42, 44) == []


def test_time_in_which_the_observer_slept_is_no_silence(detector: LivenessDetector) -> None:
    look(detector, "a", 0, 10)
    assert detector.silent("a", 300.0) == []
    assert look(detector, "a", 302, 308) == []
    assert look(detector, "a", 310, 330) == ["a"]


def test_a_process_may_have_a_limit_of_its_own(detector: LivenessDetector) -> None:
    detector.heard("slow", 0.0, limit_s=100.0)
    assert look(detector, ["slow", "b"], 0, 90) == ["b"]
    assert look(detector, ["slow", "b"], 92, 102) == ["b", "slow"]
    detector.heard("slow", 103.0, limit_s=float(LIMIT_S))
    assert look(detector, ["slow"], 104, 124) == ["slow"]


def test_limits_must_tell_a_gap_from_silence() -> None:
    with pytest.raises(AssertionError, match="the gap must be the shorter one"):
        LivenessDetector(5.0, 6.0, 0.0)
