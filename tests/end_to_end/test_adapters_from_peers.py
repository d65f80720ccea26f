"""Adapters in storage, workers that share no disk: one reads an adapter there, the others get it from that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster
from echo_job import EchoJob, make_rows

from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.tests.end_to_end.bucket import s3_server


@contextmanager
def workers_apart(folder: Path, num_workers: int) -> Iterator[tuple[Client, dict[str, Path]]]:
    """Workers as on machines of their own: what one has fetched, the others do not see. And their caches."""
    caches = {f"worker-{number}": folder / f"cache-{number}" for number in range(num_workers)}
    workers = {
        name: {"cls": Nanny, "options": {"nthreads": 1, "host": "127.0.0.1", "env": {"XDG_CACHE_HOME": str(cache)}}}
        for name, cache in caches.items()
    }
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": options}
    with (
        dask.config.set({"distributed.worker.dashboard.enabled": False}),
        SpecCluster(workers, scheduler) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client, caches


def copies(cache: Path) -> list[str]:
    """Adapters of which a worker's cache has copies, from storage or from other workers."""
    return [folder.name.rpartition("-")[0] for folder in (cache / "lorabatch" / "adapter-copies").glob("[!.]*")]


@pytest.mark.long
def test_an_adapter_is_read_from_storage_by_one_worker_only(echo_job: EchoJob, tmp_path: Path) -> None:
    # All rows want the same one, so that every worker needs it.
    rows = make_rows(96, ["rank8"])
    echo_job.write_input(rows)
    log = tmp_path / "log"
    with s3_server(tmp_path, LOG=str(log)) as bucket, workers_apart(tmp_path, 3) as (client, caches):
        bucket.fs.mkdir("bucket")
        adapters = bucket.put(echo_job.adapters, "adapters")
        echo_job.run(client, adapters=adapters, storage_options=bucket.options, rows_per_shard=8)
    echo_job.assert_answered(rows)
    opened = [event for event in echo_job.store.read_events() if event["kind"] == "RunShard"]
    # Worker -> where it fetched the adapter.
    source = {event["replica_id"]: fetch["from_replica_id"] for event in opened for fetch in event["adapter_fetches"]}
    assert len(source) == 3
    assert list(source.values()).count(None) == 1, source
    # The others have it from a worker that has it: the first, or one that got it meanwhile.
    assert set(source.values()) - {None} <= set(source), source
    assert list(map(copies, caches.values())) == [["rank8"]] * 3
    reads = [line for line in log.read_text().splitlines() if "GET" in line and "rank8/adapter_model" in line]
    assert len(reads) == 2, "the header by the client, all of it by one worker"
    assert replay_job(echo_job.store).first_difference is None


@pytest.mark.long
def test_adapters_that_workers_see_as_files_need_no_source(echo_job: EchoJob, tmp_path: Path) -> None:
    rows = make_rows(32)
    echo_job.write_input(rows)
    with workers_apart(tmp_path, 2) as (client, caches):
        echo_job.run(client)
    echo_job.assert_answered(rows)
    opened = [event for event in echo_job.store.read_events() if event["kind"] == "RunShard"]
    assert opened
    assert not any(event["adapter_fetches"] for event in opened)
    assert not any(map(copies, caches.values()))
