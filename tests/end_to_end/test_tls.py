"""A job on a cluster whose every connection is encrypted and authenticated, with certificates made for the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster_under_test import make_certificates, tls_words
from distributed import Client
from distributed.security import Security
from echo_job import ECHO_FACTORY, ECHO_FOLDER, EchoJob, make_rows

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.options.values import TlsFiles
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.listing import list_jobs
from lorabatch.pipeline.submit import submit


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """A self-signed certificate and its key, as PEM files."""
    return make_certificates(tmp_path)


@pytest.fixture
def tls_cluster(certificates: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of a scheduler with two workers that speak TLS only."""
    address_file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    common = [
        *tls_words(certificates),
        "--scheduler-file",
        str(address_file),
        "--protocol",
        "tls",
        "--host",
        "127.0.0.1",
        "--no-dashboard",
    ]
    worker = [*dask, "worker", *common, "--nthreads", "1", "--local-directory", str(tmp_path)]
    commands = [[*dask, "scheduler", *common, "--port", "0"], worker, worker]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        security = Security(
            tls_ca_file=certificates["tls_ca"],
            tls_client_cert=certificates["tls_cert"],
            tls_client_key=certificates["tls_key"],
            require_encryption=True,
        )
        with Client(
            scheduler_file=str(address_file), security=security, set_as_default=False, timeout="300s"
        ) as client:
            client.wait_for_workers(2, timeout=300)
            address = str(client.scheduler_info(n_workers=0)["address"])
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(8)
            process.kill()
            process.wait()


@pytest.mark.long
def test_a_job_runs_on_a_tls_cluster_and_strangers_are_turned_away(
    echo_job: EchoJob, tls_cluster: str, certificates: dict[str, str]
) -> None:
    assert tls_cluster.startswith("tls://")
    rows = make_rows(80)
    echo_job.write_input(rows)
    with pytest.raises(JobRequestError, match=r"no Dask scheduler answers there .* --tls-ca, --tls-cert and --tls-key"):
        echo_job.run(cluster=tls_cluster)
    echo_job.run(cluster=tls_cluster, **certificates)
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_a_job_of_a_tls_cluster_goes_on_from_another_folder_than_its_certificates(
    echo_job: EchoJob, tls_cluster: str, certificates: dict[str, str], tmp_path: Path
) -> None:
    rows = make_rows(20)
    rows[3]["adapter"] = "no-such-adapter"
    echo_job.write_input(rows)
    files = {name: Path(path).name for name, path in certificates.items()}
    options = echo_job.options(cluster=tls_cluster, max_errors="0", **files)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    over = lorabatch("run", *words, folder=tmp_path)
    assert "1 of 20 rows cannot be answered" in over.stderr
    (tmp_path / "elsewhere").mkdir()
    done = lorabatch("resume", str(echo_job.output), "--max-errors=1", folder=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert len(echo_job.rows()) == 20


def lorabatch(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


@pytest.mark.long
def test_jobs_of_a_tls_cluster_are_listed_to_who_has_its_certificates(
    echo_job: EchoJob, tls_cluster: str, certificates: dict[str, str]
) -> None:
    echo_job.write_input(make_rows(8))
    echo_job.run(cluster=tls_cluster, **certificates)
    assert list_jobs(tls_cluster, tls_files=TlsFiles(**certificates)) == []
    submit(JobSpec(**echo_job.options(cluster=tls_cluster, overwrite=True, **certificates)), ECHO_FACTORY)
    (listed,) = list_jobs(tls_cluster, tls_files=TlsFiles(**certificates))
    assert listed.startswith(echo_job.record.job_id)
    with pytest.raises(JobRequestError, match=r"tls_cert, tls_key: required beside tls_ca"):
        list_jobs(tls_cluster, tls_files=TlsFiles(tls_ca=certificates["tls_ca"]))
    with pytest.raises(JobRequestError, match="no Dask scheduler answers there"):
        list_jobs(tls_cluster)
