"""Workers that are told to leave (SIGTERM, as at preemption): what their engines have generated is not lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster_under_test import existing_cluster, own_cluster
from distributed import Client
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.state import JobState

# Rows take seconds: whoever begins them anew shows in the number of tokens that were generated.
TOKENS = 120
JOB = {"max_tokens": TOKENS, "batch_rows": 8, "rows_per_shard": 8, "migration": False}


def generated_tokens(job: EchoJob) -> int:
    return sum(map(int, (job.folder / "generated").read_text().split()))


def is_in_the_middle(state: JobState) -> bool:
    return sum(worker.running_rows == 8 for worker in state.workers) == 2


def told_to_leave(client: Client, *, coordinates: bool) -> tuple[str, int]:
    """Address and process id of a worker that coordinates the job, or of one that does not."""
    pids = client.run(os.getpid)
    coordinators = {a for a, keys in client.processing().items() if any("lora_job-" in str(key) for key in keys)}
    return next((address, pid) for address, pid in pids.items() if (address in coordinators) == coordinates)


@pytest.mark.parametrize("coordinates", [False, True])
def test_rows_of_a_worker_that_leaves_go_on_elsewhere_from_where_they_were(
    echo_job: EchoJob, coordinates: bool
) -> None:
    rows = make_rows(32)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1, trace=str(echo_job.folder / "generated"))
    left: list[str] = []
    with own_cluster() as client:

        def leave() -> None:
            address, pid = told_to_leave(client, coordinates=coordinates)
            left.append(address)
            os.kill(pid, signal.SIGTERM)

        started = Watcher(lambda state: is_in_the_middle(state) and generated_tokens(echo_job) > 300, leave)
        result = echo_job.run(client, progress=started, **JOB)
    echo_job.assert_answered(rows, max_tokens=TOKENS)
    assert (result.num_rows, result.num_errors) == (32, 0)
    # Eight rows had about twenty tokens each.
    assert generated_tokens(echo_job) < 32 * TOKENS + 40
    events = echo_job.store.read_events()
    assert (
        any(e["kind"] == "ReplicaLost" and e["replica_id"] in left and e["handed_over"] for e in events) or coordinates
    )


def test_a_cancelled_job_goes_on_from_where_its_rows_were(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(16)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1, trace=str(echo_job.folder / "generated"))
    watcher = Watcher(
        lambda state: is_in_the_middle(state) and generated_tokens(echo_job) > 300, echo_job.store.request_cancel
    )
    with pytest.raises(Exception, match="cancelled"):
        echo_job.run(shared_client, progress=watcher, **JOB)
    echo_job.run(shared_client, **JOB)
    echo_job.assert_answered(rows, max_tokens=TOKENS)
    assert generated_tokens(echo_job) < 16 * TOKENS + 40


def test_a_nanny_that_is_told_to_leave_has_its_worker_hand_over(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(32)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.1, trace=str(echo_job.folder / "generated"))
    with existing_cluster(tmp_path, num_workers=2) as (address, nannies, _):
        watcher = Watcher(
            lambda state: is_in_the_middle(state) and generated_tokens(echo_job) > 300, nannies[0].terminate
        )
        echo_job.run(progress=watcher, cluster=address, **JOB)
        assert nannies[0].wait(30) is not None
    echo_job.assert_answered(rows, max_tokens=TOKENS)
    assert generated_tokens(echo_job) < 32 * TOKENS + 40
