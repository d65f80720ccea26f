"""Mode `exact` on the real engine: any number of workers, any size of shards, migration or not, one output.

`python -m pytest -s tests/end_to_end/test_one_hash.py` prints a line for each of the eighteen jobs.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_under_test import own_cluster
from echo_job import processes_of

from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.state import JobState
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.run import run
from lorabatch.tests.end_to_end.chaos.sorted_output import digest

NUM_ROWS = 48
SHARD_ROWS = (5, 12, 24)
# An engine is let run so long, and then held up so long.
RUNS_S, HELD_UP_S = 0.1, 0.4


@pytest.fixture(scope="module")
def hashes() -> dict[str, str]:
    """Hash of the sorted output of every job so far."""
    return {}


@pytest.fixture
def options(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A job whose rows ask for the base model and every adapter, some greedily and some by chance."""
    names = [None, *sorted(tiny_adapters)]
    rows = [
        {"id": i, "adapter": names[i % 4], "prompt": f"once upon a midnight {i}", "temperature": i % 3 / 2}
        for i in range(NUM_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    return {
        "model": str(tiny_llama),
        "adapters": str(next(iter(tiny_adapters.values())).parent),
        "input": str(tmp_path / "input.parquet"),
        "mode": "exact",
        "max_tokens": 150,
        "batch_rows": 8,
        "engine_threads": 1,
        "logprobs": True,
        "ignore_eos": True,
    }


@pytest.mark.chaos
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_shards_and_migration_change_no_byte(
    num_workers: int,
    options: dict[str, Any],
    hashes: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_lent = 0
    with own_cluster(num_workers) as client:
        for rows_per_shard in SHARD_ROWS:
            for migration in (False, True):
                name = f"{num_workers} workers, shards of {rows_per_shard}, migration {'on' if migration else 'off'}"
                output = tmp_path / name
                job = options | {"output": str(output), "rows_per_shard": rows_per_shard, "migration": migration}
                with HeldUp(num_workers if migration else 99) as progress:
                    assert run(JobSpec(**job), client=client, progress=progress).num_rows == NUM_ROWS
                moves = [move for move in JobStore(str(output)).read_events() if move["kind"] == "MigrateRows"]
                assert migration or not moves
                num_lent += sum(move["num_rows"] for move in moves)
                hashes[name] = digest(output)
                with capsys.disabled():
                    lent = sum(move["num_rows"] for move in moves)
                    print(f"\n{name}: {hashes[name][:16]}, {lent} rows lent", end="", flush=True)
    assert len(set(hashes.values())) == 1, hashes
    assert num_lent or num_workers < 4


class HeldUp:
    """A job's progress that, once so many engines (two at least) work, stops one of them most of the time."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = max(2, num_workers)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update(self, state: JobState) -> None:
        working = [worker for worker in state.workers if worker.running_rows]
        if len(working) >= self._num_workers and self._thread.ident is None:
            self._thread.start()

    def note(self, text: str) -> None:
        """Nothing to do with it."""

    def _hold(self) -> None:
        engine = processes_of(os.getpid(), "engine")[0]
        with suppress(psutil.Error):
            while not self._is_over.wait(RUNS_S):
                engine.suspend()
                self._is_over.wait(HELD_UP_S)
                engine.resume()
