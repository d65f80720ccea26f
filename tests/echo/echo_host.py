"""An echo engine as a worker hosts it, and a shard for it, without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import echo_engine

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.engine.server.frames import RegisterAdapter
from lorabatch.pipeline.messages import EngineSettings, WorkerReport
from lorabatch.pipeline.supervisor.open_shard import OpenShard
from lorabatch.pipeline.supervisor.supervisor import EngineHandle, EngineSupervisor

TOKENS = 20


class Host:
    """An engine with one run, and what it reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir()
        (folder / "echo.json").write_text(json.dumps(options))
        settings = EngineSettings(
            "model", EngineConfig(num_threads=1, max_batch_rows=4), factory="echo_engine:EchoEngine"
        )
        self.reports: list[WorkerReport] = []
        self.supervisor = EngineSupervisor(settings, lambda: folder, folder, "tcp://worker")
        self.engine: EngineHandle = self.supervisor.join("run", self.reports.append)


def open_shard(owner: Host, num_rows: int, adapter: RegisterAdapter | None = None) -> OpenShard:
    """Shard 7 of an engine, whose rows all use `adapter` (None: the base model)."""
    adapter_id = adapter.adapter_id if adapter is not None else None
    requests = [Request(f"row-{i}", (i,), adapter_id, SamplingParams(max_tokens=TOKENS)) for i in range(num_rows)]
    return owner.engine.open(7, map(ExportedRow, requests), [adapter] if adapter is not None else [])


async def until(claim: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(300):
        while not claim():
            await asyncio.sleep(0.02)


async def finish(shard: OpenShard, num_rows: int, adapter_id: str | None = None) -> None:
    """Every row comes, once, with its one right answer."""
    answers: dict[str, str] = {}
    while len(answers) < num_rows:
        for row in await asyncio.to_thread(shard.take, 0.2):
            assert row.result.request_id not in answers
            answers[row.result.request_id] = row.result.text
    assert answers == {f"row-{i}": echo_engine.answer((i,), adapter_id, TOKENS) for i in range(num_rows)}
