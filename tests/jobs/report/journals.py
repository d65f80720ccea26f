"""Journals of jobs that did not run, for pictures of them."""

from __future__ import annotations

import json
from typing import Any

from lorabatch.jobs.store import JobStore
from lorabatch.scheduler.messages import (
    BEGINNING,
    EVENTS_VERSION,
    ReplicaJoined,
    ReplicaReported,
    RunShard,
    ShardCommitted,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)

ATTACK = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


def beginning(at_s: float, run_id: str = "run", coordinator: str = "", **phases: float) -> dict[str, Any]:
    """The line with which a coordinator begins. `phases`: name -> seconds."""
    line = {"kind": BEGINNING, "version": EVENTS_VERSION, "run_id": run_id, "at_s": at_s, "coordinator": coordinator}
    line["committed"] = []
    return line | {"phases": list(phases.items())}


def lines(*records: Any) -> list[dict[str, Any]]:
    return [record if isinstance(record, dict) else record.to_json() for record in records]


def append(store: JobStore, *records: Any) -> None:
    store.append_events("".join(json.dumps(line) + "\n" for line in lines(*records)).encode())


def busy_run(num_shards: int = 100, num_workers: int = 4) -> list[Any]:
    """Shards one after the other on some workers, which change their mode."""
    workers = tuple(f"tcp://10.0.0.{i}:40001" for i in range(num_workers))
    records: list[Any] = [beginning(100.0, starting=95.0, indexing=97.0, planning=98.0, running=99.0)]
    records += [WorkersSeen(0.0, workers), *(ReplicaJoined(1.0, worker, 64) for worker in workers)]
    for shard_id in range(num_shards):
        time_s, worker = 2.0 + shard_id, workers[shard_id % num_workers]
        mode = ("base", "unmerged", "merged", "mixture")[shard_id // num_workers % 4]
        records += [Tick(time_s), RunShard(shard_id, worker, 0)]
        open_shards = (UnfinishedRows(shard_id, 90),)
        records.append(ReplicaReported(time_s + 0.5, worker, 90, 60, 250.0, ("a",), open_shards, mode=mode))
        records.append(ShardCommitted(time_s + 0.9, shard_id, worker))
    return [*records, {"kind": "FinishJob"}]


def summary(*adapters: str, num_errors: int = 0, errors: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An account in which every adapter but the first has 10 rows; the first three times as many tokens."""
    counts = [
        {"adapter": adapter, "num_rows": 10, "num_errors": 0, "completion_tokens": 3000 if i == 0 else 1000}
        for i, adapter in enumerate(adapters)
    ]
    return {
        "num_rows": 1200,
        "num_errors": num_errors,
        "num_parts": 1,
        "prompt_tokens": 5000,
        "completion_tokens": sum(count["completion_tokens"] for count in counts),
        "seconds": 40.0,
        "adapters": counts,
        "errors": errors or [],
    }
