"""Jobs that answer a canary first, and that stop themselves."""

from __future__ import annotations

import os
import time

import pytest
from echo_job import ECHO_FACTORY, EchoJob, Watcher, make_rows, processes_of, wait_until

from lorabatch.jobs.errors import JobLimitError
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import read_status
from lorabatch.pipeline.planning.plan import read_plan
from lorabatch.pipeline.run import run
from lorabatch.scheduler.simulation.replay import replay

NUM_ROWS = 120


@pytest.fixture
def job(echo_job: EchoJob) -> EchoJob:
    echo_job.set_engine(step_s=0.3)
    echo_job.write_input(make_rows(NUM_ROWS))
    return echo_job


def canary_parts(job: EchoJob) -> list[str]:
    return [f"part-{shard.shard_id:05}.parquet" for shard in read_plan(job.store).shards if shard.is_canary]


def asked(job: EchoJob, answers: list[bool], **options):
    """Run the job with a person who gives these answers; returns the questions."""
    questions = []

    def ask(question: str) -> bool:
        questions.append(question)
        time.sleep(1.5)
        assert sorted(job.parts()) == canary_parts(job), "other rows ran before the answer"
        return answers.pop(0)

    try:
        run(JobSpec(**job.options(**options)), engine_factory=ECHO_FACTORY, ask=ask)
    finally:
        assert not answers
    return questions


def test_the_canary_is_answered_first_shown_and_part_of_the_job(job):
    seen = Watcher(lambda state: False, lambda: None)
    result = job.run(canary=3, progress=seen)
    assert (result.num_rows, result.num_errors) == (NUM_ROWS, 0)
    job.assert_answered(make_rows(NUM_ROWS))
    first = canary_parts(job)
    assert first == sorted(job.parts())[: len(first)]
    opened = [event["shard_id"] for event in job.store.read_events() if event["kind"] == "RunShard"]
    assert sorted(opened[: len(first)]) == list(range(len(first)))
    facts = job.store.read_canary()
    assert facts is not None
    rows = {count["adapter"]: count["num_rows"] for count in facts["adapters"]}
    assert rows == dict.fromkeys(("", "rank1", "rank8", "rank20"), 3)
    assert all(len(count["examples"]) == 3 for count in facts["adapters"])
    assert any(note.startswith("canary: 12 rows of 4 adapters answered") for note in seen.notes)
    assert {state.canary_rows for state in seen.states if state.phase == "running"} == {12}
    assert "canary" in read_status(job.store).to_json()
    outcome = replay(read_plan(job.store).shards, job.store.read_events())
    assert outcome.first_difference is None
    assert outcome.num_events > 5


def test_a_met_condition_stops_the_job_after_its_canary_and_another_one_goes_on(job):
    # `confirm` holds the other rows back, however long the count takes
    met = {"canary": 3, "confirm": True, "stop_if": "mean_tokens >= 4"}
    with pytest.raises(JobLimitError, match=r"stop_if: mean_tokens >= 4: 4\.0\. Finished rows are kept") as stopped:
        job.run(**met)
    assert stopped.value.exit_code == 5
    status = read_status(job.store)
    assert (status.outcome, status.exit_code, status.headline) == ("stopped", 5, "stopped by itself")
    assert status.canary is not None
    assert status.next_step
    before = job.parts()
    assert sorted(before) == canary_parts(job)
    with pytest.raises(JobLimitError, match="stop_if"):
        job.run(**met)
    assert job.parts() == before
    assert job.run(canary=3, stop_if="mean_tokens >= 5").num_reused >= 12
    job.assert_answered(make_rows(NUM_ROWS))
    assert before.items() <= job.parts().items()


def test_without_anybody_to_ask_the_job_stops_after_its_canary_and_the_next_run_goes_on(job):
    with pytest.raises(JobLimitError, match="confirm: the canary is answered, and nobody can be asked here"):
        job.run(canary=2, confirm=True)
    assert sorted(job.parts()) == canary_parts(job)
    assert job.run(canary=2, confirm=True).num_rows == NUM_ROWS
    job.assert_answered(make_rows(NUM_ROWS))


def test_a_person_is_asked_and_other_rows_wait_for_the_answer(job):
    with pytest.raises(JobLimitError, match="confirm: you did not agree"):
        asked(job, [False], canary=2, confirm=True)
    # asked again, before other rows run; then not any more
    assert asked(job, [True], canary=2, confirm=True) == ["Go on with the other rows?"]
    job.assert_answered(make_rows(NUM_ROWS))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seconds": 4}, r"max_seconds=4: the run has taken"),
        ({"max_cost": "0.0001 EUR", "gpu_hour_price": "100 EUR"}, r"max_cost='0.0001 EUR': the job has cost .* EUR"),
    ],
)
def test_a_limit_stops_the_job_and_a_higher_one_goes_on(job, options, sentence):
    job.set_engine(step_s=0.5)
    with pytest.raises(JobLimitError, match=sentence):
        job.run(canary=1, **options)
    assert len(job.parts()) < len(read_plan(job.store).shards)
    job.set_engine()
    assert job.run(canary=1, **dict.fromkeys(options, "1000")).num_rows == NUM_ROWS
    job.assert_answered(make_rows(NUM_ROWS))
    state = job.store.read_state()
    assert state is not None
    assert state.worker_s > 0


def test_workers_that_are_killed_in_the_canary_lose_no_row_of_it(job):
    job.set_engine(step_s=0.4)

    def kill_all() -> None:
        for process in processes_of(os.getpid(), "engine"):
            process.kill()
        job.set_engine(step_s=0.2)

    watcher = Watcher(lambda state: state.phase == "canary", kill_all)
    result = job.run(canary=4, progress=watcher)
    assert watcher.has_acted
    assert result.num_rows == NUM_ROWS
    job.assert_answered(make_rows(NUM_ROWS))
    assert job.store.read_canary() is not None


def test_adapters_with_few_rows_error_rows_and_an_update(job):
    rows = [*make_rows(40), {"id": 900, "adapter": "unknown", "prompt_token_ids": [3], "note": ""}]
    rows += [{"id": 901, "adapter": "rank1", "prompt_token_ids": [], "note": ""}]
    job.write_input(rows)
    result = job.run(canary=100, max_errors=5)
    assert (result.num_rows, result.num_errors) == (42, 2)
    assert sum(shard.is_canary for shard in read_plan(job.store).shards) >= 1
    more = [*rows[:40], *({**row, "id": 1000 + row["id"]} for row in make_rows(44)[40:])]
    job.write_input(more)
    assert job.run(canary=1, update=True).num_rows == 44
    canary = [shard for shard in read_plan(job.store).shards if shard.is_canary]
    assert sum(shard.num_rows for shard in canary) == 4
    wait_until(lambda: job.store.is_finished())
