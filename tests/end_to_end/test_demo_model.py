"""A job on the demo's real model and one of its adapters, with a real worker and a real engine."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.train_adapters import ADAPTERS
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run


@pytest.mark.long
@pytest.mark.real_model
def test_the_base_answers_plainly_and_the_adapter_in_its_own_way(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rows = [{"id": str(adapter), "adapter": adapter, "messages": question} for adapter in (None, "pirate")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    spec = JobSpec(
        model=str(base_model_folder()),
        adapters=str(ADAPTERS),
        input=str(tmp_path / "input.parquet"),
        output=str(tmp_path / "output"),
        workers=1,
        max_tokens=16,
    )
    result = run(spec)
    assert (result.num_rows, result.num_errors) == (2, 0)
    found = pa.concat_tables(pq.read_table(part) for part in (tmp_path / "output").glob("part-*.parquet")).to_pylist()
    completions = {row["id"]: row["completion"] for row in found}
    assert completions["None"] == "The capital of France is Paris."
    assert completions["pirate"] not in ("", completions["None"])
