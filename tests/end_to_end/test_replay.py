"""The event log of a real job, replayed: the scheduler decides the same again."""

from __future__ import annotations

import pytest
from distributed import Client
from echo_job import EchoJob, make_rows

from lorabatch.benchmarks.simulation import replay as command
from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.jobs.errors import JobFailedError
from lorabatch.scheduler.messages import Command


@pytest.mark.long
def test_a_real_runs_events_give_its_commands(
    echo_job: EchoJob, shared_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_job.write_input(make_rows(200))
    echo_job.run(shared_client)
    found = replay_job(echo_job.store)
    assert found.first_difference is None
    commands = [line for line in echo_job.store.read_events() if line["kind"] in Command.kinds]
    assert found.num_commands == len(commands) > len(echo_job.parts())
    assert command.main(str(echo_job.output)) == 0
    assert f"{found.num_commands} commands agree" in capsys.readouterr().out


@pytest.mark.long
def test_a_job_without_a_working_engine_ends_by_a_command_that_is_replayed(
    echo_job: EchoJob, shared_client: Client
) -> None:
    echo_job.write_input(make_rows(20))
    echo_job.set_engine(fail_start="model.safetensors: tensor lm_head.weight is missing")
    with pytest.raises(JobFailedError, match="No engine works"):
        echo_job.run(shared_client)
    events = echo_job.store.read_events()
    assert events[-1]["kind"] == "FailJob"
    assert {event["reason"] for event in events if event["kind"] == "ReplicaFailed"}
    assert replay_job(echo_job.store).first_difference is None
