"""An engine whose answers can be checked by arithmetic: the engine's interface without a model.

`answer` computes what a row must come back with from its prompt tokens and adapter, so a lost, repeated or
mixed-up row shows. The model folder may hold `echo.json` with `step_s` (seconds per step), `batch_rows`, `gate` (a
file; while it is missing nothing moves on), and what to fail on: `crash_on_token` kills the process when a prompt with
that token is in the batch, `raise_on_token` raises, `room_for_rows` is the largest batch that memory has room for,
`refuse_adapters` lists adapter ids that cannot be loaded, `fail_start` is a sentence.
`trace` is a file that gains the number of tokens of each step.
`slow_factor`: the engine that starts first on a model folder takes so many times longer.
`adapter_s`: seconds until an adapter is there that a row asks for, one adapter after another; its rows wait.

The tokens of a row are 0, 1, 2, …: a row from another engine with anything else ends the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.errors import AdapterRefusedError, ModelFilesError
from lorabatch.engine.request import ExportedRow, Request, Result
from lorabatch.engine.telemetry import EngineTelemetry
from lorabatch.scheduler.messages import StepTotals


def answer(prompt_token_ids: Sequence[int], adapter_id: str | None, max_tokens: int) -> str:
    """The one right completion of a row."""
    known = f"{list(prompt_token_ids)}|{adapter_id}|{max_tokens}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def slowness(model_folder: Path, slow_factor: float | None) -> float:
    """The factor for the first who asks, 1 for all others."""
    if slow_factor is None:
        return 1.0
    try:
        (model_folder / "slow").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    return slow_factor


class EchoEngine:
    """Finishes each row after `max_tokens` steps, `batch_rows` rows at a time, in the order they came."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        options_path = model_folder / "echo.json"
        options: dict[str, Any] = json.loads(options_path.read_text()) if options_path.exists() else {}
        if "fail_start" in options:
            raise ModelFilesError(options["fail_start"])
        self._options = options
        self._step_s: float = options.get("step_s", 0.0) * slowness(model_folder, options.get("slow_factor"))
        self.config = config
        self._batch_rows: int = options.get("batch_rows", config.batch_rows)
        self._queue: dict[str, Request] = {}
        self._steps_done: dict[str, int] = {}
        self._adapters: dict[str, Path] = {}
        self._contents: dict[str | None, str] = {}
        # Times at which adapters that rows have asked for are there, in seconds of the monotonic clock.
        self._there_s: dict[str, float] = {}
        self._adapter_s: float = options.get("adapter_s", 0.0)
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._num_steps = 0
        self._filled_steps = 0.0

    def register_adapter(self, adapter_id: str, folder: Path, name: str = "", content_sha256: str = "") -> None:
        if adapter_id in self._options.get("refuse_adapters", []):
            raise AdapterRefusedError(f"adapter {adapter_id}: refused for the test")
        self._adapters[adapter_id] = folder
        self._contents[adapter_id] = content_sha256 or adapter_id

    def import_rows(self, rows: Sequence[ExportedRow]) -> None:
        for row in rows:
            request = row.request
            assert request.adapter_id is None or request.adapter_id in self._adapters
            assert request.request_id not in self._queue, f"row {request.request_id} is here already"
            assert row.token_ids == tuple(range(len(row.token_ids))), f"row {request.request_id}: {row.token_ids}"
            self._queue[request.request_id] = request
            self._fetch(request.adapter_id)
            self._steps_done[request.request_id] = len(row.token_ids)
            self._prompt_tokens += len(request.prompt_token_ids)

    def _fetch(self, adapter_id: str | None) -> None:
        if self._adapter_s and adapter_id is not None and adapter_id not in self._there_s:
            last_s = max([time.monotonic(), *self._there_s.values()])
            self._there_s[adapter_id] = last_s + self._adapter_s

    def export_rows(self, request_ids: Collection[str]) -> list[ExportedRow]:
        found = [request_id for request_id in request_ids if request_id in self._queue]
        rows = [ExportedRow(self._queue[r], tuple(range(self._steps_done[r]))) for r in found]
        self.abort(found)
        return rows

    def expect_rows(self, adapter_id: str, num_rows: int) -> None:
        assert adapter_id in self._adapters, f"rows of an unknown adapter: {adapter_id}"

    def abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._queue.pop(request_id, None)
            self._steps_done.pop(request_id, None)

    def step(self) -> list[Result]:
        time.sleep(self._step_s)
        if not Path(self._options.get("gate", "/")).exists():
            time.sleep(0.01)
            return []
        self._num_steps += 1
        now_s = time.monotonic()
        ready = [r for r in self._queue.values() if self._there_s.get(r.adapter_id or "", 0.0) <= now_s]
        batch = ready[: self._batch_rows]
        self._fail_if_asked(batch)
        self._filled_steps += len(batch) / self._batch_rows
        if "trace" in self._options:
            with Path(self._options["trace"]).open("a") as trace:
                trace.write(f"{len(batch)}\n")
        finished = []
        for request in batch:
            self._steps_done[request.request_id] += 1
            self._generated_tokens += 1
            if self._steps_done[request.request_id] >= request.sampling.max_tokens:
                finished.append(self._result(request))
                self.abort([request.request_id])
        return finished

    def _fail_if_asked(self, batch: list[Request]) -> None:
        present = {token for request in batch for token in request.prompt_token_ids}
        if self._options.get("crash_on_token") in present:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.get("raise_on_token") in present:
            raise RuntimeError("asked to fail")
        if len(batch) > self._options.get("room_for_rows", len(batch)):
            raise MemoryError(f"no room for {len(batch)} rows")

    def _result(self, request: Request) -> Result:
        max_tokens = request.sampling.max_tokens
        return Result(
            request_id=request.request_id,
            token_ids=tuple(range(max_tokens)),
            text=answer(request.prompt_token_ids, self._contents.get(request.adapter_id), max_tokens),
            finish_reason="length",
            prompt_tokens=len(request.prompt_token_ids),
            mode="unmerged" if request.adapter_id else "base",
            token_logprobs=(-0.5,) * max_tokens if request.sampling.logprobs else None,
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    @property
    def hung_process(self) -> str | None:
        return None

    def telemetry(self) -> EngineTelemetry:
        running = min(len(self._queue), self._batch_rows)
        return EngineTelemetry(
            num_running=running,
            resident_adapter_ids=tuple(self._adapters),
            mode="unmerged",
            pages_used=running,
            pages_total=self._batch_rows,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._num_steps,
            filled_steps=self._filled_steps,
            running_tokens=sum(self._steps_done[request_id] for request_id in list(self._queue)[:running]),
            steps=StepTotals(self._num_steps, self._prompt_tokens, self._generated_tokens),
        )
