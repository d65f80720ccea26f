"""The product's own functions on a cluster of one thread: commands of a job, and changes of files at which they die."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from small_cluster import Death, EchoPlugin, SmallCluster, TurningControl, contents, watching

from lorabatch.jobs.opening import opened_job as opening
from lorabatch.jobs.record import AdapterRecord, version_id
from lorabatch.pipeline import run as run_module
from lorabatch.pipeline.coordinator import control, driver, fan_out, finishing, task
from lorabatch.pipeline.messages import new_run_id
from lorabatch.pipeline.monitoring import reporter
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.pipeline.worker import run_shard


def audited(adapters: dict[str, str], *_: Any, reads_all: bool = False) -> tuple[AdapterRecord, ...]:
    """Adapters whose content is a word in a file; "refused" is refused. Those of a name with b are as in a store: only
    their versions are known, unless a command `reads_all`.
    """
    found = []
    for name, url in sorted(adapters.items()):
        word = (Path(url) / "word").read_text()
        facts: dict[str, Any] = (
            {"verdict": "refused", "reasons": ("is no adapter.",)} if word == "refused" else {"verdict": "exact"}
        )
        sha256 = f"{name}-{word}-".ljust(64, "0")
        if "b" in name and word != "refused":
            facts["files"] = {"word": f"{len(word)} {word}"}
            if not reads_all:
                contents[version_id(sha256)] = sha256
                sha256 = version_id(sha256)
        found.append(AdapterRecord(name=name, url=url, sha256=sha256, rank=8, weight_bytes=1000, **facts))
    return tuple(found)


class Clock:
    """Time that passes with each look at it, so that a story comes out the same each time."""

    def __init__(self) -> None:
        self._now_s = time.time()

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def time(self) -> float:
        self._now_s += 0.001
        return self._now_s

    monotonic = time


class OneThread:
    """The product's own functions on `cluster`, which is another one for each command."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Path) -> None:
        self.model = model
        self.cluster: Any = None
        #: Prompt tokens of a row -> the error that an engine has for it.
        self.errors: dict[tuple[int, ...], str] = {}
        self.is_only_one_lost = False
        patch.setattr(opening, "audit_all", audited)
        clock = Clock()
        for module in (opening, finishing, driver, control, reporter, run_shard):
            patch.setattr(module, "time", clock)
        patch.setattr(run_module, "connected", lambda *_, **__: nullcontext(self.cluster))
        patch.setattr(run_module, "EarlyCheck", lambda job: nullcontext())
        patch.setattr(run_module, "launch", self._launch)
        patch.setattr(run_module, "follow", lambda client, run_id, result, *_: result)
        for module in (task, run_shard):
            patch.setattr(module, "secede", lambda: None)
        for module in (task, run_shard, fan_out):
            patch.setattr(module, "get_worker", self._worker)
        patch.setattr(task, "open_client", lambda *_, **__: nullcontext(self.cluster))
        patch.setattr(task, "client_security", lambda worker: None)
        patch.setattr(task, "JobControl", TurningControl)
        patch.setattr(driver, "_TICK_INTERVAL_S", 0.0)
        for name in ("pipe_file", "rm_file", "cp_file"):
            patch.setattr(MemoryFileSystem, name, _deadly(getattr(MemoryFileSystem, name)))

    def _worker(self) -> Any:
        return self.cluster.current or next(iter(self.cluster.workers.values()))

    def _launch(
        self, client: SmallCluster, job: Any, rows: Any, reporting: Any, engine_factory: str, *, can_ask: bool = False
    ) -> Any:
        reporting.takes_over()
        run_id = new_run_id(job.record.job_id)
        client.start(lambda: EchoPlugin(run_id, job.store, self.model, self.errors))
        settings = replace(RunSettings.of_machine("cpu-smollm2-135m", batch_rows=2), rows_per_shard=4)
        while True:
            try:
                result = task.run_job(job, run_id, time.time(), settings, 20.0)
            except Death:
                if not self.is_only_one_lost:
                    raise
                client.disk.revive()  # Dask starts the coordinator again
            else:
                return run_id, result, ()


def _deadly(change: Callable[..., Any]) -> Callable[..., Any]:
    """The same change of a file in memory, at which a process may die."""

    def changed(fs: Any, path: str, *arguments: Any, **options: Any) -> Any:
        for disk in list(watching):
            disk.changes(path)
        return change(fs, path, *arguments, **options)

    return changed
