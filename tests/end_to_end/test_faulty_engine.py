"""Faults of the real engine cost the rows that cause them, and no other row a byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client

from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run

POISON, POISONED_ROW = 123, 17
# The first rows of a shard of the base model's.
POISONED_NEIGHBOURS = [0, 1, 2, 3, 4, 5]
FAULTY = "faulty_engine:FaultyEngine"


@pytest.fixture
def job(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """Options of a job whose row 17 has the poison token in its prompt."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    write_input(tmp_path / "input.parquet", [None, *sorted(tiny_adapters)], {POISONED_ROW})
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


def write_input(path: Path, names: Sequence[str | None], poisoned: Collection[int]) -> None:
    """Forty rows of these adapters in turn; those that are poisoned have the token in their prompt."""
    prompts = [[5, 3 + i, POISON if i in poisoned else 7] for i in range(40)]
    rows = [{"id": i, "adapter": names[i % len(names)], "prompt_token_ids": p} for i, p in enumerate(prompts)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def answers(job: dict[str, Any], client: Client, output: Path, **more: Any) -> dict[int, dict[str, Any]]:
    """Id -> row of the job's output."""
    run(JobSpec(**job, output=str(output)), client=client, **more)
    parts = [pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))]
    return {row["id"]: row for row in pa.concat_tables(parts).to_pylist()}


def set_faults(job: dict[str, Any], **faults: int) -> None:
    (Path(job["model"]) / "faults.json").write_text(json.dumps(faults))


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.chaos
def test_neighbours_that_all_kill_the_real_engine_become_error_rows_and_the_job_ends(
    job: dict[str, Any], shared_client: Client, tmp_path: Path
) -> None:
    write_input(tmp_path / "input.parquet", [None], POISONED_NEIGHBOURS)
    job["max_errors"] = str(len(POISONED_NEIGHBOURS))
    right = answers(job, shared_client, tmp_path / "right")
    set_faults(job, poison_token=POISON)
    found = answers(job, shared_client, tmp_path / "output", engine_factory=FAULTY)
    assert [i for i, row in sorted(found.items()) if row["error"] is not None] == POISONED_NEIGHBOURS
    answered = {i: row["completion"] for i, row in found.items() if row["error"] is None}
    assert answered == {i: right[i]["completion"] for i in range(40) if i not in POISONED_NEIGHBOURS}


@pytest.mark.long
def test_a_real_engine_without_room_for_its_batch_goes_on_with_smaller_ones(
    job: dict[str, Any], shared_client: Client, tmp_path: Path
) -> None:
    right = answers(job, shared_client, tmp_path / "right")
    set_faults(job, room_for_rows=4)
    found = answers(job, shared_client, tmp_path / "output", engine_factory=FAULTY)
    assert {i: row["completion"] for i, row in found.items()} == {i: row["completion"] for i, row in right.items()}
    assert all(row["error"] is None for row in found.values())
