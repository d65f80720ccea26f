"""Mode `exact` on the real engine: any number of workers, any size of shards, migration or not, one output.

`python -m pytest -s tests/end_to_end/test_one_hash.py` prints a line for each of the eighteen jobs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_under_test import own_cluster

from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.run import run
from lorabatch.tests.end_to_end.chaos.sorted_output import digest

NUM_ROWS = 48
SHARD_ROWS = (5, 12, 24)
# The engine that starts first has steps six times longer: the others run out of rows, on a machine of any speed.
SLOW = {"step_s": 0.005, "slow_factor": 6}


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
    shutil.copytree(tiny_llama, tmp_path / "model")
    return {
        "model": str(tmp_path / "model"),
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
    (tmp_path / "model" / "faults.json").write_text(json.dumps(SLOW if num_workers > 1 else {}))
    num_lent = 0
    with own_cluster(num_workers) as client:
        for rows_per_shard in SHARD_ROWS:
            for migration in (False, True):
                name = f"{num_workers} workers, shards of {rows_per_shard}, migration {'on' if migration else 'off'}"
                output = tmp_path / name
                job = options | {"output": str(output), "rows_per_shard": rows_per_shard, "migration": migration}
                (tmp_path / "model" / "slow").unlink(missing_ok=True)
                result = run(JobSpec(**job), client=client, engine_factory="faulty_engine:FaultyEngine")
                assert result.num_rows == NUM_ROWS
                moves = [move for move in JobStore(str(output)).read_events() if move["kind"] == "MigrateRows"]
                assert migration or not moves
                num_lent += sum(move["num_rows"] for move in moves)
                hashes[name] = digest(output)
                with capsys.disabled():
                    lent = sum(move["num_rows"] for move in moves)
                    print(f"\n{name}: {hashes[name][:16]}, {lent} rows lent", end="", flush=True)
    assert len(set(hashes.values())) == 1, hashes
    assert num_lent or num_workers == 1
