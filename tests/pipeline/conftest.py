"""Jobs on a real local cluster with real worker and engine processes; only the model is replaced by arithmetic."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import echo_engine
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lorabatch.jobs.record import JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore

ECHO_FACTORY = "echo_engine:EchoEngine"


@dataclass
class EchoJob:
    """One job for echo engines: its folders, and what its answers must be."""

    folder: Path
    model: Path
    adapters: Path

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def store(self) -> JobStore:
        return JobStore(str(self.output))

    @property
    def record(self) -> JobRecord:
        return self.store.read_record()

    def set_engine(self, **options: Any) -> None:
        """What the echo engines do from their next start on."""
        (self.model / "echo.json").write_text(json.dumps(options))

    def write_input(self, rows: Sequence[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(list(rows)), self.folder / "input.parquet", row_group_size=64)

    def spec(self, **options: Any) -> JobSpec:
        given = {"model": str(self.model), "adapters": str(self.adapters), "input": str(self.folder / "input.parquet")}
        defaults = {"output": str(self.output), "workers": 2, "batch_rows": 8, "max_tokens": 4, "rows_per_shard": 16}
        return JobSpec(**(given | defaults | options))

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the output, in order of their id."""
        table = pa.concat_tables(pq.read_table(part) for part in sorted(self.output.glob("part-*.parquet")))
        return sorted(table.to_pylist(), key=lambda row: row["id"])

    def assert_answered(self, rows: Sequence[dict[str, Any]], max_tokens: int = 4) -> None:
        """Every row is there once, with the one right answer for its tokens and its adapter's content."""
        found = self.rows()
        assert Counter(row["id"] for row in found) == Counter(row["id"] for row in rows)
        sha = {adapter.name: adapter.sha256 for adapter in self.record.adapters}
        for asked, row in zip(sorted(rows, key=lambda row: row["id"]), found, strict=True):
            assert row["error"] is None, row
            adapter_id = sha[asked["adapter"]] if asked["adapter"] else None
            expected = echo_engine.answer(asked["prompt_token_ids"], adapter_id, max_tokens)
            assert (row["completion"], row["adapter_sha256"]) == (expected, adapter_id)


def make_rows(num_rows: int, names: Sequence[str | None] = (None, "rank1", "rank8", "rank20")) -> list[dict[str, Any]]:
    """Rows whose prompts all differ, spread over some adapters of `tiny_adapters`."""
    prompts = [[3 + i % 300, 3 + i // 300] for i in range(num_rows)]
    return [
        {"id": i, "adapter": names[i % len(names)], "prompt_token_ids": prompt, "note": f"n{i}"}
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def echo_job(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> EchoJob:
    """A job's folders: a model with real files, real adapters, and engines that answer by arithmetic."""
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent))
    shutil.copytree(tiny_llama, tmp_path / "model")
    adapters = next(iter(tiny_adapters.values())).parent
    shutil.copytree(adapters, tmp_path / "adapters")
    job = EchoJob(tmp_path, tmp_path / "model", tmp_path / "adapters")
    job.set_engine()
    return job


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """See `make_rows`."""
    return make_rows
