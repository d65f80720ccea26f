"""A real job's journal, replayed: the scheduler that decided there decides the same here."""

from __future__ import annotations

import pytest
from distributed import Client
from echo_job import EchoJob, make_rows

from lorabatch.benchmarks.simulation import replay as command
from lorabatch.benchmarks.simulation.replay import replay_job


def test_a_real_runs_events_give_its_commands(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_job.write_input(make_rows(200))
    echo_job.run(shared_client)
    found = replay_job(echo_job.store)
    assert found.first_difference is None
    commands = [line for line in echo_job.store.read_events() if line["kind"] in ("RunShard", "FinishJob", "Recall")]
    assert found.num_commands == len(commands) > len(echo_job.parts())
    monkeypatch.setattr("sys.argv", ["replay_job", str(echo_job.output)])
    assert command.main() == 0
    assert f"{found.num_commands} commands agree" in capsys.readouterr().out
