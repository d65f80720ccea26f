"""Faults of the real engine cost the rows that cause them, and no other row a byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client

from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run

POISON, POISONED_ROW = 123, 17
FAULTY = "faulty_engine:FaultyEngine"


@pytest.fixture
def job(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """Options of a job whose row 17 has the poison token in its prompt."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    names = [None, *sorted(tiny_adapters)]
    prompts = [[POISON if i == POISONED_ROW else 5, 3 + i, 7] for i in range(40)]
    rows = [{"id": i, "adapter": names[i % len(names)], "prompt_token_ids": p} for i, p in enumerate(prompts)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    adapters = next(iter(tiny_adapters.values())).parent
    return {
        "model": str(tmp_path / "model"),
        "adapters": str(adapters),
        "input": str(tmp_path / "input.parquet"),
        "max_tokens": 6,
        "mode": "exact",
        "batch_rows": 16,
        "rows_per_shard": 20,
    }


def answers(job: dict[str, Any], client: Client, output: Path, **more: Any) -> dict[int, dict[str, Any]]:
    """Id -> row of the job's output."""
    run(JobSpec(**job, output=str(output)), client=client, **more)
    parts = [pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))]
    return {row["id"]: row for row in pa.concat_tables(parts).to_pylist()}


def set_faults(job: dict[str, Any], **faults: int) -> None:
    (Path(job["model"]) / "faults.json").write_text(json.dumps(faults))


def test_a_row_that_kills_the_real_engine_becomes_one_error_row(
    job: dict[str, Any], shared_client: Client, tmp_path: Path
) -> None:
    right = answers(job, shared_client, tmp_path / "right")
    set_faults(job, poison_token=POISON)
    found = answers(job, shared_client, tmp_path / "output", engine_factory=FAULTY)
    poisoned = found.pop(POISONED_ROW)
    assert poisoned["finish_reason"] == "error"
    assert "the engine process died each time it worked on this row" in poisoned["error"]
    assert {i: row["completion"] for i, row in found.items()} == {i: right[i]["completion"] for i in found}
    assert all(row["error"] is None for row in found.values())
    assert len(found) == 39


def test_a_real_engine_without_room_for_its_batch_goes_on_with_smaller_ones(
    job: dict[str, Any], shared_client: Client, tmp_path: Path
) -> None:
    right = answers(job, shared_client, tmp_path / "right")
    set_faults(job, room_for_rows=4)
    found = answers(job, shared_client, tmp_path / "output", engine_factory=FAULTY)
    assert {i: row["completion"] for i, row in found.items()} == {i: row["completion"] for i, row in right.items()}
    assert all(row["error"] is None for row in found.values())
