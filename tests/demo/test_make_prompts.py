from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from lorabatch.demo.make_prompts import PROMPTS, SCHEMA, prompt_rows, write_prompts
from lorabatch.demo.tasks import TASKS
from lorabatch.demo.train_adapters import ADAPTERS


def test_the_shipped_file_is_what_the_script_makes(tmp_path: Path):
    count = write_prompts(tmp_path / "prompts.parquet")
    shipped = pq.read_table(PROMPTS)
    assert shipped.schema.equals(SCHEMA)
    assert shipped.num_rows == count
    assert shipped.equals(pq.read_table(tmp_path / "prompts.parquet"))


def test_rows_are_of_every_adapter_and_the_base_with_distinct_ids():
    rows = prompt_rows()
    counts = Counter(row["adapter"] for row in rows)
    assert set(counts) == {*TASKS, None}
    assert 240 <= len(rows) <= 320
    assert len({row["id"] for row in rows}) == len(rows)
    assert all((ADAPTERS / name / "adapter_config.json").exists() for name in counts if name)


def test_no_shipped_prompt_was_trained_on():
    for name, task in TASKS.items():
        trained = {example.prompt for example in task.examples("train", 1600, seed=1)}
        shipped = {row["messages"][-1]["content"] for row in prompt_rows() if row["adapter"] == name}
        assert shipped
        assert trained.isdisjoint(shipped)
