"""The coordinator is a task like any other: its worker may die, and others go on where it was."""

from __future__ import annotations

import os
import signal
import threading

from cluster_under_test import own_cluster
from distributed import Client
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.state import JobState


def half_done(state: JobState) -> bool:
    return state.phase == "running" and state.rows // 4 < state.rows_done < state.rows


def coordinating_worker(client: Client) -> str:
    """Address of the worker that coordinates a job."""
    return next(
        worker
        for worker, keys in client.processing().items()
        if any(key.startswith("lora_job") for key in map(str, keys))
    )


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
    assert all(open_shards == [] for _, _, open_shards in first["replicas"])
    adopted = {worker: {shard for shard, _ in open_shards} for worker, _, open_shards in second["replicas"]}
    # What the other worker had open went on there, and was not begun again.
    # A worker that has started in place of the killed one may be there too, without a shard.
    (survivor,) = [worker for worker, shards in adopted.items() if shards]
    assert survivor not in killed
    committed_by = {
        r["shard_id"]: r["replica_id"] for r in echo_job.store.read_events() if r["kind"] == "ShardCommitted"
    }
    assert {committed_by.get(shard, survivor) for shard in adopted[survivor]} == {survivor}
