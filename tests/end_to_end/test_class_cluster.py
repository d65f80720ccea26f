"""Jobs on clusters that are started from a class, and on the scheduler that a scheduler file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_under_test import existing_cluster
from echo_job import EchoJob, make_rows

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cluster.class_cluster import address_in_file
from lorabatch.pipeline.listing import list_jobs
from lorabatch.pipeline.submit import submit

LOCAL = "dask.distributed.LocalCluster"


def test_a_job_runs_on_a_cluster_of_a_class_and_records_none_of_its_options(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(40)
    echo_job.write_input(rows)
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "env": {"TOKEN": "hush"}}
    echo_job.run(cluster=LOCAL, workers=None, cluster_options=options)
    echo_job.assert_answered(rows)
    assert echo_job.record.spec.cluster == LOCAL
    assert not any(b"hush" in file.read_bytes() for file in echo_job.output.rglob("*") if file.is_file())
    with pytest.raises(JobRequestError, match="a cluster that is started from its class ends with this command"):
        submit(JobSpec(**echo_job.options(cluster=LOCAL, output=str(tmp_path / "other"))))


@pytest.mark.long
def test_a_job_runs_on_the_cluster_that_its_scheduler_file_names(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(16)
    echo_job.write_input(rows)
    with existing_cluster(tmp_path, 1) as (address, _, _):
        file = tmp_path / "scheduler.json"
        assert json.loads(file.read_text())["address"] == address == address_in_file(str(file))
        echo_job.run(scheduler_file=str(file))
        assert list_jobs(None, scheduler_file=str(file)) == list_jobs(address)
        with pytest.raises(JobRequestError, match="each names a cluster"):
            list_jobs(address, scheduler_file=str(file))
    echo_job.assert_answered(rows)
    record = echo_job.record
    assert record.spec.scheduler_file == str(file)
    # another cluster to go on with takes the place of the recorded one, by whichever name
    assert record.job_spec(cluster="tcp://host:1").scheduler_file is None
    assert record.job_spec(scheduler_file="other.json").cluster == "local"
