"""Jobs that answer a canary first, and that stop themselves."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster_under_test import existing_cluster
from echo_job import ECHO_FACTORY, ECHO_FOLDER, EchoJob, Watcher, make_rows, processes_of, wait_until

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


CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]
QUESTION = b"Go on with the other rows? [y/N]"


class Terminal:
    """A command in a terminal of its own, whose standard output is a file."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        self._stdout = (folder / "stdout").open("wb")
        self.process = subprocess.Popen(words, stdin=slave, stderr=slave, stdout=self._stdout, start_new_session=True)
        os.close(slave)
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self.shown += data

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        code = self.process.wait(300)
        self._reader.join(60)
        self._stdout.close()
        os.close(self._master)
        return code


def job_file(job: EchoJob, **options) -> str:
    path = job.folder / "job.yaml"
    path.write_text(json.dumps(job.options(**options)))
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize("keys", [b"y\n", b"n\n", b"\x04", b"\n"])
def test_a_terminal_shows_the_question_and_anything_but_yes_ends_the_job(job, tmp_path, keys):
    job.set_engine(step_s=0.05)
    terminal = Terminal([*CLI, "run", job_file(job, canary=2, confirm=True), "--json"], tmp_path)
    wait_until(lambda: QUESTION in terminal.shown or terminal.process.poll() is not None)
    assert QUESTION in terminal.shown, terminal.shown
    assert sorted(job.parts()) == canary_parts(job)
    terminal.type(keys)
    code = terminal.end()
    assert QUESTION not in (tmp_path / "stdout").read_bytes(), "standard output is for programs"
    if keys == b"y\n":
        assert code == 0, terminal.shown
        job.assert_answered(make_rows(NUM_ROWS))
        return
    assert code == 5, terminal.shown
    assert b"you did not agree" in b" ".join(terminal.shown.split())
    assert sorted(job.parts()) == canary_parts(job)
    # without a terminal, the next run goes on
    done = subprocess.run([*CLI, "resume", str(job.output)], capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    job.assert_answered(make_rows(NUM_ROWS))


def said(*words: str) -> tuple[int, str]:
    """Exit code of a command, and what it prints, blanks joined."""
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.long
def test_a_submitted_job_stops_after_its_canary_and_by_its_cost(job, background):
    job.set_engine(step_s=0.05)
    code, text = said("submit", job_file(job, canary=2, confirm=True))
    assert code == 0, text
    code, text = said("wait", str(job.output))
    assert (code, "confirm: the canary is answered" in text) == (5, True), text
    assert sorted(job.parts()) == canary_parts(job)
    job.set_engine(step_s=0.5)
    code, text = said("submit", job_file(job, canary=2, max_cost="0.0001 EUR", gpu_hour_price="100 EUR"))
    assert code == 0, text
    code, text = said("wait", str(job.output))
    assert (code, "max_cost" in text) == (5, True), text
    assert read_status(job.store).headline == "stopped by itself"
    job.set_engine()
    assert job.run(canary=2).num_rows == NUM_ROWS
    job.assert_answered(make_rows(NUM_ROWS))


@pytest.mark.long
def test_a_canary_runs_on_an_existing_cluster_that_stays_for_the_next_job(job, tmp_path):
    job.set_engine(step_s=0.05)
    (tmp_path / "cluster").mkdir()
    with existing_cluster(tmp_path / "cluster", num_workers=2) as (address, _, _):
        with pytest.raises(JobLimitError, match="confirm: the canary is answered"):
            job.run(cluster=address, canary=2, confirm=True)
        assert sorted(job.parts()) == canary_parts(job)
        job.set_engine(step_s=0.5)
        with pytest.raises(JobLimitError, match="max_cost"):
            job.run(cluster=address, canary=2, max_cost="0.0001", gpu_hour_price="100")
        job.set_engine()
        assert asked(job, [], cluster=address, canary=2) == []
        job.assert_answered(make_rows(NUM_ROWS))
