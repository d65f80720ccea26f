"""Jobs without a model: on a real local cluster with engines that answer by arithmetic (`echo_job`), and on paper
only, from a table of rows to a written plan and back (`prepare_job`).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import echo_engine
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lorabatch.engine.request import Request
from lorabatch.jobs.opening import make_record
from lorabatch.jobs.record import AdapterRecord, JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.jobs.validation import check_job
from lorabatch.pipeline.index import ChunkSummary, index_chunk, list_chunks
from lorabatch.pipeline.index_job import IndexJob
from lorabatch.pipeline.planning import JobPlan, plan_job
from lorabatch.pipeline.reader import ShardRows, read_shard
from lorabatch.pipeline.row_answer import RowAnswer

ECHO_FACTORY = "echo_engine:EchoEngine"
ADAPTERS = (
    AdapterRecord(name="alpha", url="/alpha", verdict="exact", sha256="a" * 64, rank=8, weight_bytes=1000),
    AdapterRecord(name="beta", url="/beta", verdict="exact", sha256="b" * 64, rank=16, weight_bytes=2000),
    AdapterRecord(name="broken", url="/broken", verdict="refused", reasons=("all of lora_B is zero.",)),
)


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


@dataclass(frozen=True)
class PreparedJob:
    """A frozen job with adapters alpha, beta and (refused) broken, and how to take it on."""

    spec: JobSpec
    store: JobStore
    record: JobRecord

    def index(self) -> list[ChunkSummary]:
        job = IndexJob.from_record(self.record, self.spec)
        return [index_chunk(chunk, job, self.store) for chunk in list_chunks(self.record)]

    def plan(self, num_replicas: int = 1) -> JobPlan:
        return plan_job(
            self.store, self.record, self.index(), batch_rows=self.spec.batch_rows, num_replicas=num_replicas
        )

    def shards(self) -> list[ShardRows]:
        return [read_shard(self.store, self.record, shard.shard_id) for shard in self.plan().shards]


def echo(rows: ShardRows, attempts: int = 1) -> dict[str, RowAnswer]:
    """An answer for every request of a shard that says what was asked."""
    fingerprint = rows.fingerprint_of()
    return {
        request.request_id: RowAnswer(
            fingerprint=fingerprint[request.request_id],
            adapter_sha256=request.adapter_id,
            completion=f"echo {request.prompt_token_ids}",
            finish_reason="stop",
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=3,
            mode="unmerged" if request.adapter_id else "base",
            attempts=attempts,
            token_ids=(1, 2, 3) if request.sampling.logprobs else None,
            token_logprobs=(-0.5, -0.25, 0.0) if request.sampling.logprobs else None,
        )
        for request in rows.requests
        if isinstance(request, Request)
    }


@pytest.fixture(scope="session")
def answer_by_echo() -> Callable[..., dict[str, RowAnswer]]:
    """See `echo`."""
    return echo


@pytest.fixture
def prepare_job(weightless_model: Path, tmp_path: Path) -> Callable[..., PreparedJob]:
    """`prepare_job(table or {file name: table}, row_group_rows=…, **spec)`: a job frozen in a folder of its own."""
    numbers = count()

    def prepare(tables: pa.Table | Mapping[str, pa.Table], row_group_rows: int = 1000, **values: Any) -> PreparedJob:
        folder = tmp_path / f"job-{next(numbers)}"
        (folder / "in").mkdir(parents=True)
        files = tables if isinstance(tables, Mapping) else {"rows.parquet": tables}
        for name, table in files.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / "in" / name, row_group_size=row_group_rows, write_page_checksum=True)
        given = {
            "model": str(weightless_model),
            "input": str(folder / "in"),
            "output": str(folder / "out"),
            "load_format": "dummy",
            "max_tokens": 8,
            "max_errors": "100%",
        }
        checked = check_job(JobSpec(**given | values))
        record = make_record(checked).model_copy(update={"adapters": ADAPTERS})
        checked.store.freeze(record)
        return PreparedJob(checked.spec, checked.store, record)

    return prepare
