"""A real cluster that grows for a job's backlog and shrinks when it is done."""

from __future__ import annotations

import threading
import time

import dask
import pytest
from cluster_under_test import QUIETLY
from distributed import Client, LocalCluster
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.errors import JobFailedError
from lorabatch.pipeline.monitoring.scheduler_plugin import JobAdaptive


@pytest.mark.long
def test_workers_come_for_the_backlog_join_the_job_and_leave(echo_job: EchoJob) -> None:
    rows = make_rows(320)
    echo_job.write_input(rows)
    # No row moves on before a second worker has joined, however long that takes.
    gate = echo_job.folder / "gate"
    echo_job.set_engine(step_s=0.05, gate=str(gate))
    watcher = Watcher(lambda state: len(state.workers) > 1, gate.touch)
    with LocalCluster(n_workers=1, **QUIETLY) as cluster, Client(cluster, set_as_default=False) as client:
        cluster.adapt(JobAdaptive, minimum=1, maximum=3, interval="500ms", wait_count=3)
        echo_job.run(client, progress=watcher)
        echo_job.assert_answered(rows)
        give_up_s, pause = time.monotonic() + 300, threading.Event()
        while len(client.scheduler_info(n_workers=-1)["workers"]) > 1:
            assert time.monotonic() < give_up_s, "workers stay although nothing is to be done"
            pause.wait(0.2)
    events = echo_job.store.read_events()
    joined = {record["replica_id"] for record in events if record["kind"] == "ReplicaJoined"}
    assert len(joined) >= 2
    committed = {record["replica_id"] for record in events if record["kind"] == "ShardCommitted"}
    assert len(committed) >= 2


def test_a_job_ends_in_words_when_its_cluster_gets_no_worker(echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(20))
    with (
        dask.config.set({"distributed.scheduler.no-workers-timeout": "1s"}),
        LocalCluster(n_workers=0, **QUIETLY) as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(JobFailedError, match=r"had no worker for 1 s .* Finished rows are kept; start workers"),
    ):
        echo_job.run(client)
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "failed"


@pytest.mark.long
def test_a_command_says_that_its_cluster_has_no_workers_and_goes_on_when_it_has_one(echo_job: EchoJob) -> None:
    class Owner(Watcher):
        def note(self, text: str) -> None:
            super().note(text)
            if "The cluster has no workers" in text:
                cluster.scale(1)

    rows = make_rows(20)
    echo_job.write_input(rows)
    watcher = Owner(lambda state: False, lambda: None)
    with LocalCluster(n_workers=0, **QUIETLY) as cluster, Client(cluster, set_as_default=False) as client:
        echo_job.run(client, progress=watcher)
    echo_job.assert_answered(rows)
    assert sum("The cluster has no workers" in note for note in watcher.notes) == 1
