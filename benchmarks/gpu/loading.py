"""Measures what a new adapter costs an engine: from its file to a first token, and merging it as the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, SamplingParams

_RANK = 16
_NUM_ADAPTERS = {"cuda": 6, "cpu": 2}
_POOL_BYTES = {"cuda": 6 << 30, "cpu": 8 << 20}


def measure_loading(
    folder: Path, device: torch.device, deadline: Deadline, save: Callable[[Any], None]
) -> dict[str, float]:
    """Milliseconds: a row's first token when its adapter has to be read and when it is there; switches to an adapter in
    host memory, and from its files. Adapters a second, when many are asked for at once."""
    if not deadline.allows("all of it"):
        return {}
    config = EngineConfig(
        device=device.type,
        kernels="triton" if device.type == "cpu" else "auto",
        load_format="dummy",
        mode="auto",
        max_batch_rows=16,
        max_step_tokens=512,
        pool_bytes=_POOL_BYTES[device.type],
        host_tier_bytes=4 << 30,
        uses_prefix_cache=False,
    )
    engine = Engine(folder, config)
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        if not deadline.allows(name):
            return
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found[name] = (time.perf_counter() - began_s) * 1e3
        save(found)

    began_s = time.perf_counter()
    paths = [
        write_random_adapter(folder.parent / f"file{number}", engine.model, _RANK, seed=number)
        for number in range(_NUM_ADAPTERS[device.type])
    ]
    found["writing_files_ms"] = (time.perf_counter() - began_s) * 1e3
    ids = [_registered(engine, path) for path in paths]
    timed("base_first_token_ms", lambda: _first_token(engine, None))  # compiles too
    timed("base_first_token_again_ms", lambda: _first_token(engine, None))
    timed("first_token_of_new_adapter_ms", lambda: _first_token(engine, ids[0]))
    timed("first_token_of_resident_adapter_ms", lambda: _first_token(engine, ids[0]))
    timed("switch_ms", lambda: engine.switch_weights(ids[0]))  # its memory is taken, its kernel compiled
    timed("restore_ms", lambda: engine.switch_weights(None))
    timed("switch_from_pool_ms", lambda: engine.switch_weights(ids[0]))
    engine._batch.residency.loader.prefetch(ids[1:2])
    while not engine._batch.residency.loader.is_ready(ids[1]):
        time.sleep(0.001)
    timed("switch_from_host_ms", lambda: engine.switch_weights(ids[1]))
    engine.switch_weights(None)
    timed("switch_from_files_ms", lambda: engine._merge_from_files(ids[0]))
    engine.switch_weights(None)
    began_s, fresh = time.perf_counter(), ids[2:]
    if fresh and deadline.allows("adapters_per_s"):
        for result in engine.run([_row(f"{number}", adapter_id) for number, adapter_id in enumerate(fresh)]):
            assert result.error is None, result.error
        found["adapters_per_s"] = len(fresh) / (time.perf_counter() - began_s)
        save(found)
    return found


def _registered(engine: Engine, path: Path) -> str:
    content = audit_adapter(path, engine.model, path.name).content_sha256
    assert content is not None, f"the random adapter {path} was refused"
    engine.register_adapter(content, path)
    return content


def _row(request_id: str, adapter_id: str | None) -> Request:
    return Request(request_id, (1, 2, 3), adapter_id, SamplingParams(max_tokens=1, ignore_eos=True))


def _first_token(engine: Engine, adapter_id: str | None) -> None:
    for result in engine.run([_row("first", adapter_id)]):
        assert result.error is None, result.error
