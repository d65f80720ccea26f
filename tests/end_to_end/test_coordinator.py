"""The coordinator is a task like any other: its worker may die, and others go on where it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from cluster_under_test import existing_cluster, own_cluster
from distributed import Client
from echo_job import ECHO_FACTORY, EchoJob, Watcher, make_rows, wait_until

from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.engine.config import EngineConfig
from lorabatch.jobs.errors import InputRowsError, JobFailedError
from lorabatch.jobs.opening.opened_job import open_job
from lorabatch.jobs.record import JobState
from lorabatch.jobs.report.timeline import read_timelines
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cluster.devices import find_device
from lorabatch.pipeline.coordinator.lease import keep_leases
from lorabatch.pipeline.coordinator.losses import count_losses
from lorabatch.pipeline.coordinator.task import run_job
from lorabatch.pipeline.messages import EngineSettings, job_key
from lorabatch.pipeline.monitoring.reporter import JobReporter
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.pipeline.run import LEASE_SETTING
from lorabatch.pipeline.worker.registration import register_plugin, unregister_plugin

STAGES = ["indexing", "planning", "loading engines", "running"]


def half_done(state: JobState) -> bool:
    return state.phase == "running" and state.rows // 4 < state.rows_done < state.rows


def coordinating_worker(client: Client) -> str:
    """Address of the worker that coordinates a job."""
    return next(
        worker
        for worker, keys in client.processing().items()
        if any(key.startswith("lora_job") for key in map(str, keys))
    )


@pytest.mark.long
def test_a_job_goes_on_when_the_worker_that_coordinates_it_is_killed(echo_job: EchoJob) -> None:
    rows = make_rows(320)
    echo_job.write_input(rows)
    gate = echo_job.folder / "gate"
    gate.touch()
    echo_job.set_engine(step_s=0.2, gate=str(gate))
    with own_cluster() as client:
        pids = client.run(os.getpid)
        killed: list[str] = []

        def kill() -> None:
            # No row moves on until the next coordinator has looked around.
            gate.unlink()
            killed.append(coordinating_worker(client))
            os.kill(pids[killed[0]], signal.SIGKILL)
            threading.Thread(target=open_gate_when_found).start()

        def open_gate_when_found() -> None:
            pause = threading.Event()
            while sum(record["kind"] == "ReplicasFound" for record in echo_job.store.read_events()) < 2:
                pause.wait(0.1)
            gate.touch()

        result = echo_job.run(client, progress=Watcher(half_done, kill))
    echo_job.assert_answered(rows)
    assert (result.num_rows, result.num_errors) == (320, 0)
    events = echo_job.store.read_events()
    first, second, *_ = [record for record in events if record["kind"] == "ReplicasFound"]
    assert all(replica["open_shards"] == [] for replica in first["replicas"])
    adopted = {
        replica["replica_id"]: {rows["shard_id"] for rows in replica["open_shards"]} for replica in second["replicas"]
    }
    # What the other worker had open went on there, and was not begun again. The killed worker's last report is found
    # too, one that has started in its place may be there without a shard, and the other may be between two shards.
    survivors = [worker for worker, shards in adopted.items() if shards and worker not in killed]
    assert len(survivors) <= 1
    opened_again = [r for r in events[events.index(second) :] if r["kind"] == "RunShard"]
    assert not {r["replica_id"] for r in opened_again} & set(killed)
    committed_by = {
        r["shard_id"]: r["replica_id"] for r in echo_job.store.read_events() if r["kind"] == "ShardCommitted"
    }
    assert all(committed_by.get(shard, worker) == worker for worker in survivors for shard in adopted[worker])
    replayed = replay_job(echo_job.store)
    assert (replayed.first_difference, replayed.num_passed_over) == (None, 0)
    # One timeline has the workers of both, the killed one lost once and for good.
    (run,) = read_timelines(echo_job.store.read_events())
    assert run.coordinators[0][1] == killed[0]
    assert len(run.coordinators) == 2
    assert {track.worker: len(track.losses) for track in run.tracks}[killed[0]] == 1
    phases = [name for name, _ in run.phases]
    assert phases == ["opening", "starting", *STAGES, "restarting", *STAGES, "finishing"]
    assert [start_s for _, start_s in run.phases] == sorted(start_s for _, start_s in run.phases)


def found(job: EchoJob) -> list[dict[str, Any]]:
    """What each coordinator found when it began."""
    return [record for record in job.store.read_events() if record["kind"] == "ReplicasFound"]


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("wakes_up", [True, False])
def test_a_coordinator_that_hangs_is_replaced_and_does_no_harm_when_it_wakes_up(
    echo_job: EchoJob, tmp_path: Path, wakes_up: bool
) -> None:
    rows = make_rows(320)
    echo_job.write_input(rows)
    gate = echo_job.folder / "gate"
    gate.touch()
    echo_job.set_engine(step_s=0.1, gate=str(gate))
    hung: list[int] = []

    def go_on_when_replaced() -> None:
        wait_until(lambda: len(found(echo_job)) == 2)
        if wakes_up:
            os.kill(hung[0], signal.SIGCONT)
        gate.touch()

    # Dask's own settings would give the worker five minutes.
    with (
        dask.config.set({LEASE_SETTING: "5s"}),
        existing_cluster(tmp_path, num_workers=2) as (address, _, _),
        Client(address, set_as_default=False) as client,
    ):
        pids = client.run(os.getpid)

        def hang() -> None:
            gate.unlink()
            hung.append(pids[coordinating_worker(client)])
            os.kill(hung[0], signal.SIGSTOP)
            threading.Thread(target=go_on_when_replaced).start()

        try:
            result = echo_job.run(progress=Watcher(half_done, hang), cluster=address)
            if wakes_up:
                # The first coordinator has left everything as it was.
                wait_until(lambda: coordinators(client) == [])
                assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        finally:
            os.kill(hung[0], signal.SIGKILL)
    echo_job.assert_answered(rows)
    assert (result.num_rows, result.num_errors) == (320, 0)
    assert len(found(echo_job)) == 2
    assert replay_job(echo_job.store).first_difference is None
    state = echo_job.store.read_state()
    assert state is not None
    assert state.phase == "done"


@pytest.mark.long
def test_what_a_cut_off_attempt_leaves_of_a_finished_job_is_put_right(shared_client: Client, echo_job: EchoJob) -> None:
    """A coordinator that begins while another one ends, and then hangs, is replaced by one that finds all done."""
    rows = make_rows(30)
    echo_job.write_input(rows)
    first = echo_job.run(shared_client)
    done = echo_job.store.read_state()
    assert done is not None
    left = [echo_job.output / "_lorabatch" / name for name in ("rows", "wip", "tmp")]
    for folder in left:
        folder.mkdir()
        (folder / "left").write_bytes(b"left")
    echo_job.store.write_state(JobState("running", 1.0, rows=30, rows_done=30))
    assert echo_job.run(shared_client) == first
    assert not any(folder.exists() for folder in left)
    state = echo_job.store.read_state()
    assert state is not None
    names = ("phase", "rows", "rows_done", "shards", "shards_done", "completion_tokens")
    assert [getattr(state, name) for name in names] == [getattr(done, name) for name in names]
    echo_job.assert_answered(rows)


def coordinators(client: Client) -> list[str]:
    """Workers on which a coordinator runs, by their own account."""

    def is_coordinating(dask_worker: Any) -> bool:
        return any(
            str(key).startswith("lora_job-") and task.state not in ("memory", "released", "forgotten")
            for key, task in dask_worker.state.tasks.items()
        )

    return [worker for worker, is_busy in client.run(is_coordinating).items() if is_busy]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_coordinator_after_one_that_has_ended_the_run_ends_too(
    echo_job: EchoJob, shared_client: Client, is_recorded: bool
) -> None:
    """The first one's worker was lost after it had ended the engines, and before Dask had its error."""
    echo_job.write_input(make_rows(8))
    keep_leases(shared_client)
    count_losses(shared_client)
    job = open_job(JobSpec(**echo_job.options()))
    engines = EngineSettings(str(echo_job.model), EngineConfig(), ECHO_FACTORY)
    run_id = register_plugin(shared_client, job.record.job_id, engines, job.store)
    unregister_plugin(shared_client, run_id)
    if is_recorded:
        reporter = JobReporter(job.store, lambda state: None, job.spec.error_budget)
        reporter.begins("running")
        reporter.received(replace(reporter.latest, run_id=run_id))
        reporter.ended(InputRowsError("adapter 'a': wrong"))
    settings = RunSettings.of(job, 2, find_device("cpu", 1))
    again = shared_client.submit(run_job, job, run_id, time.time(), settings, 20.0, key=job_key(run_id), pure=False)
    error, text = (InputRowsError, "adapter 'a': wrong") if is_recorded else (JobFailedError, "was lost while the run")
    with pytest.raises(error, match=text):
        again.result(60)
