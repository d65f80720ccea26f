"""A hung engine is noticed, a busy one is left alone."""

from __future__ import annotations

from lorabatch.pipeline.engine_pulse import SILENCE_LIMIT_S, START_SILENCE_LIMIT_S, STEP_LIMIT_S, EnginePulse


def watched(pulse: EnginePulse, from_s: float, to_s: float, *, is_ready: bool) -> str | None:
    """The first problem seen by somebody who looks every second."""
    for now_s in range(int(from_s), int(to_s) + 1):
        if problem := pulse.problem(float(now_s), is_ready=is_ready):
            return problem
    return None


def test_silence_of_a_ready_engine_is_noticed_after_seconds_and_of_a_starting_one_after_minutes() -> None:
    assert watched(EnginePulse(0.0), 0, SILENCE_LIMIT_S, is_ready=True) is None
    assert "no sign of life" in str(watched(EnginePulse(0.0), 0, SILENCE_LIMIT_S + 1, is_ready=True))
    assert watched(EnginePulse(0.0), 0, START_SILENCE_LIMIT_S, is_ready=False) is None
    assert watched(EnginePulse(0.0), 0, START_SILENCE_LIMIT_S + 1, is_ready=False) is not None


def test_an_engine_in_a_long_step_is_left_alone_until_the_step_is_absurd() -> None:
    pulse = EnginePulse(0.0)
    for now_s in range(int(STEP_LIMIT_S) + 1):
        pulse.heard(float(now_s), step_s=float(now_s))
        assert pulse.problem(float(now_s), is_ready=True) is None
    pulse.heard(STEP_LIMIT_S + 1, step_s=STEP_LIMIT_S + 1)
    assert "one step took" in str(pulse.problem(STEP_LIMIT_S + 1, is_ready=True))


def test_a_watcher_that_slept_itself_holds_nothing_against_the_engine() -> None:
    pulse = EnginePulse(0.0)
    assert watched(pulse, 0, 10, is_ready=True) is None
    assert pulse.problem(500.0, is_ready=True) is None
    assert watched(pulse, 501, 504, is_ready=True) is None
    assert watched(pulse, 505, 520, is_ready=True) is not None


def test_a_new_process_starts_with_a_clean_slate() -> None:
    pulse = EnginePulse(0.0)
    pulse.heard(1.0, step_s=10_000.0)
    pulse.start(2.0)
    assert pulse.problem(2.5, is_ready=True) is None
