"""Schedulers and workers without lorabatch, or with another version of it, are refused: real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_under_test import existing_cluster
from distributed import Client
from echo_job import ECHO_FOLDER, EchoJob, Watcher, make_rows

from lorabatch import __version__
from lorabatch.jobs.errors import JobFailedError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.listing import list_jobs
from lorabatch.pipeline.submit import submit

CLI = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]
# Preloaded by Dask before any other module of lorabatch is imported.
PRELOADS = {
    "none": 'import sys\n\nsys.modules["lorabatch"] = None\n',
    "0.0.9": 'import lorabatch.version\n\nlorabatch.__version__ = lorabatch.version.__version__ = "0.0.9"\n',
}


def preload(folder: Path, version: str) -> tuple[str, str]:
    """Options of a Dask process that then has this version, or "none"."""
    path = folder / "preloaded.py"
    path.write_text(PRELOADS[version])
    return "--preload", str(path)


@pytest.mark.long
@pytest.mark.parametrize("version", PRELOADS)
def test_a_scheduler_without_this_version_is_refused_with_one_line(
    echo_job: EchoJob, tmp_path: Path, version: str
) -> None:
    echo_job.write_input(make_rows(8))
    options = ("--model", echo_job.model, "--input", echo_job.folder / "input.parquet", "--output", echo_job.output)
    with existing_cluster(tmp_path, 1, scheduler_options=preload(tmp_path, version)) as (address, _, _):
        commands = (["run", *options], ["submit", *options], ["list"])
        for words in commands:
            done = subprocess.run([*CLI, *map(str, words), "--cluster", address], capture_output=True, text=True)
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
            line = done.stderr.splitlines()[-1]
            assert line.startswith(f"lorabatch: cluster: lorabatch {__version__} is expected on the scheduler")
            assert f"the scheduler has {version}. Install lorabatch {__version__}" in line


@pytest.mark.long
@pytest.mark.parametrize("version", PRELOADS)
def test_workers_without_this_version_are_refused_and_named(echo_job: EchoJob, tmp_path: Path, version: str) -> None:
    echo_job.write_input(make_rows(8))
    with (
        existing_cluster(tmp_path, 1, worker_options=preload(tmp_path, version)) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        with pytest.raises(JobFailedError, match=rf"1 of 1 workers .* \(tcp://.* has {version}\)"):
            echo_job.run(client)
        with pytest.raises(JobFailedError, match="1 of 1 workers"):
            submit(JobSpec(**echo_job.options(cluster=address)))
        assert list_jobs(address) == []


@pytest.mark.long
def test_a_worker_of_another_version_that_joins_a_running_job_leaves_and_says_why(
    echo_job: EchoJob, tmp_path: Path
) -> None:
    rows = make_rows(320)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1)
    printed = []
    with existing_cluster(tmp_path, 1) as (address, _, _):
        late = [sys.executable, "-m", "dask", "worker", address, "--host", "127.0.0.1", "--no-dashboard"]
        late += ["--nthreads", "1", "--local-directory", str(tmp_path), *preload(tmp_path, "0.0.9")]

        def join() -> None:
            # It ends by itself, with its nanny, while the job goes on: that takes 16 s at least.
            printed.append(subprocess.run(late, stderr=subprocess.PIPE, text=True, timeout=300).stderr)

        watcher = Watcher(lambda state: bool(state.rows_done), join)
        echo_job.run(progress=watcher, cluster=address)
    assert watcher.has_acted
    assert f"lorabatch='0.0.9': a job runs on this cluster with '{__version__}', so this worker leaves." in printed[0]
    echo_job.assert_answered(rows)
