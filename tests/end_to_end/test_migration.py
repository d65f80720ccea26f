"""Rows that move between real workers while they run: nothing is lost, repeated or changed when one is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster_under_test import own_cluster
from distributed import Client
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.jobs.cost_profile import CostProfile, machine
from lorabatch.jobs.record import JobState
from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M

# One engine takes fifteen times longer: its first batch is far from done when the other has nothing to do. Even there
# a batch takes two seconds, so that incoming rows are seen in states that are reported once a second.
SLOW = {"step_s": 0.05, "slow_factor": 15}
JOB = {"max_tokens": 40, "batch_rows": 8, "rows_per_shard": 8}


def moves(store: JobStore) -> list[dict[str, Any]]:
    return [record for record in store.read_events() if record["kind"] == "MigrateRows"]


def has_incoming_rows(state: JobState) -> bool:
    return any(worker.incoming_rows for worker in state.workers)


def test_rows_of_a_slow_worker_are_finished_by_an_idle_one(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(48)
    echo_job.write_input(rows)
    echo_job.set_engine(**SLOW)
    watcher = Watcher(has_incoming_rows, lambda: None)
    result = echo_job.run(shared_client, progress=watcher, **JOB)
    echo_job.assert_answered(rows, max_tokens=40)
    assert (result.num_rows, result.num_errors) == (48, 0)
    assert moves(echo_job.store)
    assert watcher.has_acted
    # The owner kept its shards: each was committed by the worker that had opened it.
    events = echo_job.store.read_events()
    opened = {record["shard_id"]: record["replica_id"] for record in events if record["kind"] == "RunShard"}
    committed = {r["shard_id"]: r["replica_id"] for r in events if r["kind"] == "ShardCommitted"}
    assert opened == committed


@pytest.mark.long
def test_dlora_moves_rows_of_one_adapter_at_a_time(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(64)
    echo_job.write_input(rows)
    echo_job.set_engine(**SLOW)
    # dLoRA's price of an adapter on a replica is 0.01 s: by a guess of a tiny model's steps, no move of rows pays
    cost = replace(CPU_SMOLLM2_135M, step_s=SLOW["step_s"])
    profile = CostProfile("", machine(), "2026-11-30T00:00:00+00:00", "cpu", "float32", 1, 2, 8, {}, cost)
    path = echo_job.folder / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    result = echo_job.run(shared_client, policy="dlora", cost_model=str(path), **JOB)
    echo_job.assert_answered(rows, max_tokens=40)
    assert (result.num_rows, result.num_errors) == (64, 0)
    found = moves(echo_job.store)
    assert found
    assert all(move["is_selective"] for move in found)
    assert replay_job(echo_job.store).first_difference is None


@pytest.mark.long
def test_nothing_moves_when_the_job_says_so(echo_job: EchoJob, shared_client: Client) -> None:
    rows = make_rows(24)
    echo_job.write_input(rows)
    echo_job.set_engine(**SLOW)
    echo_job.run(shared_client, migration=False, **JOB | {"max_tokens": 12})
    echo_job.assert_answered(rows, max_tokens=12)
    assert moves(echo_job.store) == []


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("sent", "victim"),
    [
        pytest.param(signal.SIGKILL, "owner", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "helper", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, "owner", marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, "helper", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "owner", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "helper", marks=pytest.mark.long),
    ],
)
def test_a_worker_lost_with_rows_on_loan_loses_and_repeats_nothing(
    echo_job: EchoJob, victim: str, sent: signal.Signals
) -> None:
    rows = make_rows(48)
    echo_job.write_input(rows)
    echo_job.set_engine(**SLOW)
    with own_cluster(3) as client:
        pids = client.run(os.getpid)
        result = echo_job.run(
            client, progress=Watcher(has_incoming_rows, disturb(echo_job.store, pids, victim, sent)), **JOB
        )
    echo_job.assert_answered(rows, max_tokens=40)
    assert (result.num_rows, result.num_errors) == (48, 0)


def disturb(store: JobStore, pids: dict[str, int], victim: str, sent: signal.Signals) -> Callable[[], None]:
    """Send a signal to the worker process at one end of the first loan."""

    def act() -> None:
        # The state is published at once, the event log written once a second.
        pause = threading.Event()
        while not moves(store):
            pause.wait(0.1)
        move = moves(store)[0]
        address = move["from_replica_id" if victim == "owner" else "to_replica_id"]
        os.kill(pids[address], sent)

    return act
