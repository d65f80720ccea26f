"""Jobs on hosts of their own: partitions, and links that are slow, lossy and out of order."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_job import EchoJob, make_rows, wait_until

from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import BEGINNING
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server
from lorabatch.tests.end_to_end.hosts.cluster import HostCluster, end_of, host_cluster
from lorabatch.tests.end_to_end.hosts.network import why_no_hosts

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_no_hosts() is not None, reason=why_no_hosts() or "")]

# What a job that is done leaves of its records; logs, if anything was worth a line.
RECORDS = {"job.json", "index", "parts.json", "plan.arrow", "plan.json", "state.json", "events.jsonl", "summary.json"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HostCluster]:
    with host_cluster(tmp_path / "cluster", num_workers=2) as cluster:
        yield cluster


def last(job: EchoJob, kind: str) -> dict[str, Any]:
    """The last event of that kind, once there is one."""
    wait_until(lambda: any(event["kind"] == kind for event in job.store.read_events()))
    return [event for event in job.store.read_events() if event["kind"] == kind][-1]


def assert_done(job: EchoJob, rows: list[dict[str, Any]], max_tokens: int) -> None:
    job.assert_answered(rows, max_tokens)
    names = {path.name for path in job.output.iterdir()}
    assert names - set(job.parts()) == {"_SUCCESS", "_lorabatch"}
    records = {path.name for path in (job.output / "_lorabatch").iterdir()} - {"logs"}
    # in an object store, one object for each piece that was appended
    assert {"events.jsonl" if name.startswith("events.jsonl.") else name for name in records} == RECORDS


@pytest.mark.parametrize("healed_after_s", [5.0, 60.0, None])
def test_rows_on_loan_come_back_or_are_computed_by_their_owner(
    echo_job: EchoJob, cluster: HostCluster, healed_after_s: float | None
) -> None:
    rows = make_rows(64)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.02, slow_factor=30)
    client = cluster.client(echo_job, max_tokens=40, rows_per_shard=8)
    loan = last(echo_job, "MigrateRows")
    owner, helper = (cluster.net.host_of(loan[f"{end}_replica_id"]) for end in ("from", "to"))
    cluster.net.set_weather((owner, helper))
    heal(cluster, healed_after_s)
    end_of(client)
    assert_done(echo_job, rows, max_tokens=40)


class OnS3:
    """A job whose output is on the host `store`."""

    def __init__(self, job: EchoJob, cluster: HostCluster, bucket: Bucket) -> None:
        self._job = job
        self._cluster = cluster
        self._bucket = bucket
        self.store = JobStore("s3://bucket/output", bucket.own_options)

    def start(self) -> subprocess.Popen[str]:
        options = json.dumps(self._bucket.options_at(self._cluster.net.address("store")))
        return self._cluster.client(self._job, storage=options, output="s3://bucket/output")

    def coordinator(self) -> str:
        """Its host, once two parts are there."""
        wait_until(lambda: len(self.store.committed_parts()) > 1)
        began = [event for event in self.store.read_events() if event["kind"] == BEGINNING]
        return self._cluster.net.host_of(began[-1]["coordinator"])

    def fetch(self) -> None:
        """Have the output where a local job's is."""
        self._bucket.fs.invalidate_cache()
        self._bucket.fs.get("bucket/output/", str(self._job.output), recursive=True)


@pytest.fixture
def on_s3(echo_job: EchoJob, cluster: HostCluster, tmp_path: Path) -> Iterator[OnS3]:
    echo_job.set_engine(step_s=0.1)
    also = f"{cluster.net.namespace('store')} {cluster.net.address('store')}"
    with s3_server(tmp_path, ALSO_AT=also) as bucket:
        bucket.fs.mkdir("bucket")
        yield OnS3(echo_job, cluster, bucket)


@pytest.mark.parametrize("healed_after_s", [5.0, 60.0, None])
def test_a_worker_without_storage_waits_for_it_or_leaves_the_job_to_others(
    echo_job: EchoJob, cluster: HostCluster, on_s3: OnS3, healed_after_s: float | None
) -> None:
    rows = make_rows(128)
    echo_job.write_input(rows)
    client = on_s3.start()
    (other,) = {*cluster.workers} - {on_s3.coordinator()}
    cluster.net.set_weather((other, "store"))
    heal(cluster, healed_after_s)
    end_of(client)
    on_s3.fetch()
    assert_done(echo_job, rows, max_tokens=4)


def test_a_coordinator_without_storage_ends_the_job_with_a_sentence_and_a_resume_finishes_it(
    echo_job: EchoJob, cluster: HostCluster, on_s3: OnS3
) -> None:
    rows = make_rows(128)
    echo_job.write_input(rows)
    client = on_s3.start()
    cluster.net.set_weather((on_s3.coordinator(), "store"))
    _, said = client.communicate(timeout=420)
    assert client.returncode == 1
    assert re.search(r"cannot .* s3://bucket/output.*: no reply .*Check the network", said)
    assert "Traceback" not in said
    cluster.net.set_weather()
    end_of(on_s3.start())
    on_s3.fetch()
    assert_done(echo_job, rows, max_tokens=4)


def test_a_job_is_done_whose_coordinator_loses_storage_at_its_very_end(
    echo_job: EchoJob, cluster: HostCluster, on_s3: OnS3
) -> None:
    rows = make_rows(128)
    echo_job.write_input(rows)
    client = on_s3.start()
    coordinator = on_s3.coordinator()
    # Slow enough that what comes after `_SUCCESS` is still to be done when it is seen here.
    cluster.net.set_weather(delay_s=0.2)
    wait_until(on_s3.store.is_finished)
    cluster.net.set_weather((coordinator, "store"))
    end_of(client)
    state = on_s3.store.read_state()
    assert state is not None
    assert state.phase == "done"
    on_s3.fetch()
    assert_done(echo_job, rows, max_tokens=4)


@pytest.mark.parametrize("healed_after_s", [5.0, 60.0, None])
def test_a_coordinator_that_is_cut_off_is_replaced_or_goes_on(
    echo_job: EchoJob, cluster: HostCluster, healed_after_s: float | None
) -> None:
    rows = make_rows(256)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.2)
    client = cluster.client(echo_job)
    coordinator = cluster.net.host_of(last(echo_job, BEGINNING)["coordinator"])
    wait_until(lambda: len(echo_job.parts()) > 1)
    cluster.net.set_weather((coordinator, "scheduler"))
    heal(cluster, healed_after_s)
    end_of(client)
    assert_done(echo_job, rows, max_tokens=4)
    if healed_after_s is None:
        assert cluster.net.host_of(last(echo_job, BEGINNING)["coordinator"]) != coordinator


def test_a_job_runs_over_links_that_are_slow_lossy_and_out_of_order(echo_job: EchoJob, cluster: HostCluster) -> None:
    cluster.net.set_weather(delay_s=0.02, loss=0.02, reordering=0.05)
    rows = make_rows(64)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.02, slow_factor=30)
    client = cluster.client(echo_job, max_tokens=40, rows_per_shard=8)
    assert last(echo_job, "MigrateRows")
    end_of(client)
    assert_done(echo_job, rows, max_tokens=40)


def heal(cluster: HostCluster, after_s: float | None) -> None:
    """Let everything through again after so long, if ever."""
    if after_s is not None:
        threading.Event().wait(after_s)
        cluster.net.set_weather()
