"""A job for echo engines, what its answers must be, and ways to disturb it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import echo_engine
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client

from lorabatch.jobs.record import JobRecord, JobState
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.result import JobResult
from lorabatch.pipeline.run import run

ECHO_FACTORY = "echo_engine:EchoEngine"
ECHO_FOLDER = Path(echo_engine.__file__).parent


@dataclass
class EchoJob:
    """One job for echo engines: its folders, and what its answers must be."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapters(self) -> Path:
        return self.folder / "adapters"

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

    def write_input(self, rows: Sequence[dict[str, Any]], rows_per_group: int = 64) -> None:
        pq.write_table(pa.Table.from_pylist(list(rows)), self.folder / "input.parquet", row_group_size=rows_per_group)

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the job, as a job file has them."""
        given = {"model": str(self.model), "adapters": str(self.adapters), "input": str(self.folder / "input.parquet")}
        defaults = {"output": str(self.output), "workers": 2, "batch_rows": 8, "max_tokens": 4, "rows_per_shard": 16}
        return given | defaults | more

    def write_job_file(self) -> Path:
        """The same options as a job file."""
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(self.options()))
        return path

    def run(self, client: Client | None = None, progress: Any = None, **options: Any) -> JobResult:
        """Run the job with echo engines."""
        return run(JobSpec(**self.options(**options)), client=client, progress=progress, engine_factory=ECHO_FACTORY)

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the output, in order of their id."""
        table = pa.concat_tables(pq.read_table(part) for part in sorted(self.output.glob("part-*.parquet")))
        return sorted(table.to_pylist(), key=lambda row: row["id"])

    def parts(self) -> dict[str, int]:
        """Name of each part and when it was written."""
        return {part.name: part.stat().st_mtime_ns for part in self.output.glob("part-*.parquet")}

    def assert_answered(self, rows: Sequence[dict[str, Any]], max_tokens: int = 4) -> None:
        """Every row is there once, with the one right answer for its tokens and its adapter's content."""
        found = self.rows()
        assert Counter(row["id"] for row in found) == Counter(row["id"] for row in rows)
        store = self.store
        sha = {adapter.name: store.content_of(adapter.sha256) for adapter in self.record.adapters}
        for asked, row in zip(sorted(rows, key=lambda row: row["id"]), found, strict=True):
            assert row["error"] is None, row
            adapter_id = sha[asked["adapter"]] if asked["adapter"] else None
            expected = echo_engine.answer(asked["prompt_token_ids"], adapter_id, max_tokens)
            assert (row["completion"], row["adapter_sha256"]) == (expected, adapter_id)


def make_rows(num_rows: int, names: Sequence[str | None] = (None, "rank1", "rank8", "rank20")) -> list[dict[str, Any]]:
    """Rows whose prompts all differ, spread over some adapters of `tiny_adapters`."""
    # Two tokens tell 90,000 rows apart; the vocabulary has 320.
    prompts = [[3 + i % 300, 3 + i // 300 % 300, *([3 + i // 90_000] if i >= 90_000 else [])] for i in range(num_rows)]
    return [
        {"id": i, "adapter": names[i % len(names)], "prompt_token_ids": prompt, "note": f"n{i}"}
        for i, prompt in enumerate(prompts)
    ]


class Watcher:
    """A job's progress that calls `act` once, as soon as `is_time` holds."""

    def __init__(self, is_time: Callable[[JobState], bool], act: Callable[[], None]) -> None:
        self._is_time = is_time
        self._act: Callable[[], None] | None = act
        self.states: list[JobState] = []
        self.notes: list[str] = []

    @property
    def has_acted(self) -> bool:
        return self._act is None

    def update(self, state: JobState) -> None:
        self.states.append(state)
        if self._act is not None and self._is_time(state):
            act, self._act = self._act, None
            act()

    def note(self, text: str) -> None:
        self.notes.append(text)


def processes_of(root: int, kind: str) -> list[psutil.Process]:
    """Engine processes ("engine"), those of their groups ("member") or Dask workers ("worker") below a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_of = {
            "engine": "lorabatch.engine.server.process" in line,
            "member": "lorabatch.engine.parallel.member" in line,
            "worker": "multiprocessing.spawn" in line or "Nanny" in line,
        }
        if is_of[kind] and not (kind == "worker" and is_of["engine"]):
            found.append(process)
    return found


def kill_one(kind: str, root: int | None = None) -> None:
    """kill -9 of one engine or worker process of this test."""
    os.kill(processes_of(root or os.getpid(), kind)[0].pid, signal.SIGKILL)


def wait_until(claim: Callable[[], bool]) -> None:
    """Return when something holds; a busy machine may take minutes."""
    give_up_s = time.monotonic() + 300
    while not claim():
        assert time.monotonic() < give_up_s, "waited for five minutes"
        time.sleep(0.1)
