"""The real engine with a fault built in: what no real row does on request.

The model folder may hold `faults.json` with `poison_token` (a row whose prompt has it kills the process, as a driver's
crash would), `room_for_rows` (an engine set up for more rows than that runs out of memory as soon as it works),
`step_s` (seconds added to each step), `slow_factor` (for the engine that starts first, so many times that) and
`dies_at_step` (the first engine to come so far is killed there).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from echo_engine import slowness

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import ExportedRow, Result


class FaultyEngine(Engine):
    """The engine, but for its faults."""

    def __init__(self, model_folder: Path, config: EngineConfig) -> None:
        super().__init__(model_folder, config)
        faults = json.loads((model_folder / "faults.json").read_text())
        self._step_s = faults.get("step_s", 0.0) * slowness(model_folder, faults.get("slow_factor"))
        self._poison_token = faults.get("poison_token")
        self._has_room = config.batch_rows <= faults.get("room_for_rows", config.batch_rows)
        self._is_poisoned = False
        self._dies_at_step = faults.get("dies_at_step")
        self._has_died = model_folder / "has-died"
        self._num_steps = 0

    def import_rows(self, rows: Iterable[ExportedRow]) -> None:
        rows = list(rows)
        self._is_poisoned |= any(self._poison_token in row.request.prompt_token_ids for row in rows)
        super().import_rows(rows)

    def step(self) -> list[Result]:
        if self._is_poisoned:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._has_room:
            raise MemoryError("no room for so many rows")
        self._num_steps += 1
        if self._num_steps == self._dies_at_step and not self._has_died.exists():
            self._has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._step_s)
        return super().step()
