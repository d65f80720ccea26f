"""A job taken from a table of rows to a written plan, without workers and without weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import echo_engine
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_host import Host

from lorabatch.engine.request import Request
from lorabatch.engine.teacher import token_bytes
from lorabatch.jobs.input.partitions import with_adapter_column
from lorabatch.jobs.opening.opened_job import make_record
from lorabatch.jobs.opening.validation import check_job
from lorabatch.jobs.record import AdapterRecord, JobRecord
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.dataset.answers import RowAnswer
from lorabatch.pipeline.dataset.chunk import IndexJob
from lorabatch.pipeline.dataset.index import IndexTotals, index_chunk, list_chunks
from lorabatch.pipeline.dataset.reader import ShardRows, read_shard
from lorabatch.pipeline.planning.plan import JobPlan, plan_job
from lorabatch.pipeline.planning.settings import RunSettings

ADAPTERS = (
    AdapterRecord(name="alpha", url="/alpha", verdict="exact", sha256="a" * 64, rank=8, weight_bytes=1000),
    AdapterRecord(name="beta", url="/beta", verdict="exact", sha256="b" * 64, rank=8, weight_bytes=2000),
    AdapterRecord(name="broken", url="/broken", verdict="refused", reasons=("all of lora_B is zero.",)),
)


@dataclass(frozen=True)
class PreparedJob:
    """A frozen job with adapters alpha, beta and (refused) broken, and how to take it on."""

    spec: JobSpec
    store: JobStore
    record: JobRecord

    def index(self) -> list[IndexTotals]:
        job = IndexJob.from_record(self.record, self.spec)
        return [index_chunk(chunk, job, self.store) for chunk in list_chunks(self.record)]

    def plan(self, num_replicas: int = 1, **options: Any) -> JobPlan:
        totals, settings = IndexTotals.of(self.index()), self.settings()
        return plan_job(self.store, self.record, totals, num_replicas=num_replicas, settings=settings, **options)

    def settings(self) -> RunSettings:
        found = RunSettings.of_machine("cpu-smollm2-135m", batch_rows=self.spec.batch_rows)
        size = token_bytes(self.spec.sampling.teacher_top_k)
        return replace(found, rows_per_shard=self.spec.rows_per_shard, shares_prefixes=True, answer_token_bytes=size)

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
    """`prepare_job(table or {file name: table}, row_group_rows=…, **spec)`: a job frozen in a folder of its own.

    Columns with names of settings are settings. A table may be the bytes of a file. `swept`: adapters that answer every
    row.
    """
    numbers = count()

    def prepare(
        tables: pa.Table | Mapping[str, pa.Table | bytes],
        row_group_rows: int = 1000,
        swept: tuple[str | None, ...] = (),
        adapters: tuple[AdapterRecord, ...] = ADAPTERS,
        **values: Any,
    ) -> PreparedJob:
        folder = tmp_path / f"job-{next(numbers)}"
        (folder / "in").mkdir(parents=True)
        files = tables if isinstance(tables, Mapping) else {"rows.parquet": tables}
        for name, table in files.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(table, bytes):  # a file as another program writes it
                (folder / "in" / name).write_bytes(table)
            else:
                pq.write_table(table, folder / "in" / name, row_group_size=row_group_rows, write_page_checksum=True)
        given = {
            "model": str(weightless_model),
            "input": str(folder / "in"),
            "output": str(folder / "out"),
            "load_format": "dummy",
            "max_tokens": 8,
            "max_errors": "100%",
            "row_settings": "all",
        }
        checked = check_job(JobSpec(**given | values))
        record = make_record(checked).model_copy(update={"adapters": adapters, "swept": swept})
        if swept:
            record = record.model_copy(update={"input": with_adapter_column(record.input, "")})
        checked.store.freeze(record)
        return PreparedJob(checked.spec, checked.store, record)

    return prepare


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Start an engine with the echo engine's options."""
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent), prepend=os.pathsep)
    made: list[Host] = []

    def start(**options: Any) -> Host:
        made.append(Host(tmp_path / f"engine-{len(made)}", **options))
        return made[-1]

    yield start
    for host in made:
        host.supervisor.close(10)
