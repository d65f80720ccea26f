"""When a dead engine process is worth another start.

A hung engine is noticed, a busy one is left alone.
"""

from __future__ import annotations

from lorabatch.pipeline.supervisor.health import (
    FIRST_DELAY_S,
    MAX_BLAMED_ROWS,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    MAX_FRUITLESS_DEATHS,
    SILENCE_S,
    START_SILENCE_S,
    STEP_S,
    EngineHealth,
    RestartPolicy,
)


def test_a_process_that_dies_at_work_is_started_again_at_once() -> None:
    policy = RestartPolicy()
    policy.started()
    assert policy.died("it was killed by signal 9", is_permanent=False) is None
    assert policy.delay_s == FIRST_DELAY_S


def test_pauses_grow_while_nothing_gets_done_and_start_over_with_the_first_row() -> None:
    policy = RestartPolicy()
    delays = []
    for _ in range(8):
        policy.started()
        assert policy.died("a crash", is_permanent=False) is None
        delays.append(policy.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S
    policy.started()
    policy.row_finished()
    assert policy.died("a crash", is_permanent=False) is None
    assert policy.delay_s == FIRST_DELAY_S


def test_what_the_process_calls_permanent_is_final() -> None:
    assert RestartPolicy().died("config.json: missing", is_permanent=True) == "config.json: missing"


def test_starts_that_fail_are_counted_in_a_row() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_FAILED_STARTS - 1):
        assert policy.died("no memory", is_permanent=False) is None
    policy.started()
    policy.row_finished()
    # The first death is of the process that worked; the starts after it fail.
    for _ in range(1 + MAX_FAILED_STARTS):
        hopeless = policy.died("no memory", is_permanent=False)
    assert hopeless == f"the engine process could not be started {MAX_FAILED_STARTS} times: no memory"


def test_crashing_for_ever_without_a_row_ends_one_day() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_FRUITLESS_DEATHS):
        policy.started()
        hopeless = policy.died("a crash", is_permanent=False)
    assert hopeless is not None
    assert "without finishing a row" in hopeless


def test_deaths_that_bring_the_search_for_a_poison_row_on_are_not_counted_and_cost_no_pause() -> None:
    policy = RestartPolicy()
    for _ in range(10 * MAX_FRUITLESS_DEATHS):
        policy.started()
        assert policy.died("a crash", is_permanent=False, is_of_search=True) is None
        assert policy.delay_s == FIRST_DELAY_S


def test_rows_blamed_in_succession_end_one_day_and_a_finished_row_clears_them() -> None:
    policy = RestartPolicy()
    for num_blamed in [1] * (MAX_BLAMED_ROWS - 1):
        policy.started()
        assert policy.died("a crash", False, is_of_search=True, num_blamed=num_blamed) is None
    policy.row_finished()
    for _ in range(MAX_BLAMED_ROWS):
        policy.started()
        hopeless = policy.died("a crash", False, is_of_search=True, num_blamed=1)
    assert hopeless is not None
    assert "rows in succession" in hopeless


def test_a_search_does_not_excuse_processes_that_cannot_be_started() -> None:
    policy = RestartPolicy()
    policy.started()
    policy.died("a crash", is_permanent=False, is_of_search=True)
    for _ in range(MAX_FAILED_STARTS):
        hopeless = policy.died("no memory", is_permanent=False)
    assert hopeless is not None


def health(*, is_ready: bool) -> EngineHealth:
    """That of a process which is ready, or starts, at time 0."""
    made = EngineHealth(0.0)
    made.heard(0.0, is_ready=is_ready)
    return made


def watched(engine: EngineHealth, from_s: float, to_s: float) -> str | None:
    """The first problem that an observer sees who looks every second."""
    for now_s in range(int(from_s), int(to_s) + 1):
        if problem := engine.problem(float(now_s)):
            return problem
    return None


def test_silence_of_a_ready_engine_is_noticed_after_seconds_and_of_a_starting_one_after_minutes() -> None:
    assert watched(health(is_ready=True), 0, SILENCE_S) is None
    assert watched(health(is_ready=True), 0, SILENCE_S + 1) == "it sent no heartbeat for 15 s"
    assert watched(health(is_ready=False), 0, START_SILENCE_S) is None
    assert watched(health(is_ready=False), 0, START_SILENCE_S + 1) == "it sent no heartbeat for 300 s"


def test_an_engine_in_a_long_step_is_left_alone_until_the_step_is_absurd() -> None:
    engine = EngineHealth(0.0)
    for now_s in range(int(STEP_S) + 1):
        engine.heard(float(now_s), is_ready=True, step_s=float(now_s))
        assert engine.problem(float(now_s)) is None
    engine.heard(STEP_S + 1, is_ready=True, step_s=STEP_S + 1)
    assert "one step took" in str(engine.problem(STEP_S + 1))


def test_the_time_in_which_the_supervisor_itself_was_stopped_is_no_silence() -> None:
    engine = health(is_ready=True)
    assert watched(engine, 0, 10) is None
    assert engine.problem(500.0) is None
    assert watched(engine, 501, 504) is None
    assert watched(engine, 505, 520) is not None


def test_a_new_process_starts_with_a_clean_slate() -> None:
    engine = EngineHealth(0.0)
    engine.heard(1.0, is_ready=True, step_s=10_000.0)
    engine.start(2.0)
    assert watched(engine, 3, 2 + START_SILENCE_S) is None
