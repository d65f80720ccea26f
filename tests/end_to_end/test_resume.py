"""`lorabatch resume`: jobs go on from their output, on another cluster and from another folder than they began."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster_under_test import existing_cluster
from distributed import Client
from echo_job import ECHO_FOLDER, EchoJob, make_rows

from lorabatch.jobs.errors import ErrorBudgetError

pytestmark = pytest.mark.long

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


def lorabatch(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *words], capture_output=True, text=True, timeout=300, check=False, cwd=folder)


def arguments(job: EchoJob, **more: str) -> list[str]:
    return ["run", *(f"--{name.replace('_', '-')}={value}" for name, value in job.options(**more).items())]


@pytest.mark.chaos
def test_a_job_whose_client_and_scheduler_died_goes_on_from_its_output_on_another_cluster(
    echo_job: EchoJob, tmp_path: Path
) -> None:
    rows = make_rows(240)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.05)
    pause = threading.Event()
    with existing_cluster(tmp_path, num_workers=2) as (gone, _, scheduler):
        client = subprocess.Popen([*CLI, *arguments(echo_job, cluster=gone)], stderr=subprocess.DEVNULL)
        while len(echo_job.parts()) < 2:
            assert client.poll() is None, "the client ended by itself"
            pause.wait(0.05)
        client.kill()
        client.wait()
        scheduler.kill()
    kept = echo_job.parts()
    assert 2 <= len(kept) < 15
    refused = lorabatch("resume", str(echo_job.output))
    assert refused.returncode == 2
    assert f"cluster='{gone}': no Dask scheduler answers there" in refused.stderr
    assert "name another one with --cluster" in refused.stderr
    echo_job.set_engine()
    (tmp_path / "new").mkdir()
    with existing_cluster(tmp_path / "new", num_workers=1) as (new, _, _):
        done = lorabatch("resume", str(echo_job.output), "--cluster", new)
    assert done.returncode == 0, done.stderr
    assert "of them were done before this run" in done.stdout
    echo_job.assert_answered(rows)
    assert {name: echo_job.parts()[name] for name in kept} == kept
    assert echo_job.record.spec.cluster == new


def test_a_job_of_a_python_client_goes_on_from_its_output_on_a_cluster_with_another_error_budget(
    echo_job: EchoJob, shared_client: Client
) -> None:
    rows = make_rows(40)
    rows[3]["adapter"] = "no-such-adapter"
    echo_job.write_input(rows)
    with pytest.raises(ErrorBudgetError):
        echo_job.run(client=shared_client, max_errors="0")
    assert echo_job.record.spec.cluster == "local"
    job_id = echo_job.record.job_id
    address = shared_client.scheduler_info(n_workers=0)["address"]
    assert lorabatch("resume", str(echo_job.output), "--cluster", address).returncode == 1
    done = lorabatch("resume", str(echo_job.output), "--cluster", address, "--max-errors", "10%")
    assert done.returncode == 0, done.stderr
    assert (echo_job.record.job_id, len(echo_job.rows())) == (job_id, 40)
    assert (echo_job.record.spec.cluster, echo_job.record.spec.max_errors) == (address, "10%")


def test_a_job_of_this_machine_goes_on_with_another_number_of_workers(echo_job: EchoJob) -> None:
    rows = make_rows(20)
    rows[3]["adapter"] = "no-such-adapter"
    echo_job.write_input(rows)
    assert lorabatch(*arguments(echo_job, max_errors="0")).returncode == 1
    done = lorabatch("resume", str(echo_job.output), "--workers", "1", "--max-errors", "1")
    assert done.returncode == 0, done.stderr
    assert len(echo_job.rows()) == 20
    assert echo_job.record.spec.workers == 1
    wrong = lorabatch("resume", str(echo_job.output), "--workers", "0", "--max-errors", "few")
    assert wrong.returncode == 2
    assert "workers='0'" in wrong.stderr
    assert "max_errors='few'" in wrong.stderr
