"""Compiles every kernel that the other sections launch, many at once, into the cache that all their processes share.

Triton compiles one kernel after the other: some 45 s for one number format. Here each process serves a few rows that
need its share of the kernels, on a model of few layers and the real widths.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import ModelShape
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams

# A kernel that got a number of layers times four as a multiple of 16 serves all such numbers.
_LAYERS = 4
_POOL_BYTES = 1 << 30
_TINY_POOL_BYTES = 4 << 20
# More than a tile; a few in the interpreter.
_PROMPT_TOKENS, _TINY_PROMPT_TOKENS, _NUM_TOKENS = 70, 5, 2
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels: of steps of decode rows, or with prompts; greedy, or drawn with log-probabilities; or of a
    merge."""

    dtype: str
    has_prompts: bool = False
    draws: bool = False
    merges: bool = False

    @property
    def name(self) -> str:
        """For the results."""
        kind = "merge" if self.merges else "sampling" if self.draws else "prompts" if self.has_prompts else "decode"
        return f"{kind} in {self.dtype}"


def kernels_of(dtypes: tuple[torch.dtype, ...]) -> list[Kernels]:
    """Shares of about equal length, the first number format's first."""
    names = [_DTYPES[dtype] for dtype in dtypes]
    kinds = [{"has_prompts": True}, {}, {"draws": True}, {"merges": True}]
    return [Kernels(name, **kind) for name in names for kind in kinds]


def compile_all(
    shape: ModelShape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> dict[str, Any]:
    """Seconds of each share, and what failed. In Triton's interpreter nothing is compiled: the shares run in turn."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "seconds": {}, "not_compiled": {}}
    with tempfile.TemporaryDirectory() as name:
        layers = min(_LAYERS, shape.num_layers)
        folder = write_model_folder(Path(name) / "model", replace(shape, num_layers=layers))
        workers = max(1, os.cpu_count() or 1) if device.type == "cuda" else 1
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            asked: dict[Future[float], Kernels] = {
                pool.submit(compile_some, str(folder), kernels, device.type): kernels for kernels in kernels_of(dtypes)
            }
            try:
                for future in as_completed(asked, timeout=deadline.left_s):
                    error = future.exception()
                    if error is None:
                        found["seconds"][asked[future].name] = round(future.result(), 1)
                    else:
                        found["not_compiled"][asked[future].name] = f"{type(error).__name__}: {error}"
                    save(found)
            except TimeoutError:
                done = found["seconds"].keys() | found["not_compiled"].keys()
                late = [kernels.name for kernels in asked.values() if kernels.name not in done]
                found["not_compiled"] |= dict.fromkeys(late, "no time left")
                for process in list(pool._processes.values()):
                    process.kill()
    found["kernels"] = resources_of(Path(os.environ["TRITON_CACHE_DIR"])) if "TRITON_CACHE_DIR" in os.environ else []
    return found


def resources_of(cache: Path) -> list[dict[str, Any]]:
    """Registers, bytes of them kept in memory, shared memory and warps of every kernel in a cache of Triton's."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    rows = []
    for code in sorted(cache.glob("*/*.cubin")):
        facts = json.loads(code.with_suffix(".json").read_text(encoding="utf-8"))
        usage = subprocess.run(
            [tool, "--dump-resource-usage", code], capture_output=True, text=True, check=False
        ).stdout
        numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        rows.append(
            {
                "kernel": code.stem,
                "registers": numbers.get("REG"),
                "stack_bytes": numbers.get("STACK", 0) + numbers.get("LOCAL", 0),
                "shared_bytes": facts.get("shared"),
                "num_warps": facts.get("num_warps"),
            }
        )
    return rows


def compile_some(folder: str, kernels: Kernels, device: str) -> float:
    """Serve rows that launch these kernels, in a process of its own; seconds."""
    began_s = time.perf_counter()
    is_gpu = device == "cuda"
    try:
        with torch.inference_mode():
            _serve(Path(folder), kernels, device, _POOL_BYTES if is_gpu else _TINY_POOL_BYTES)
    except Exception:
        traceback.print_exc()
        raise
    return time.perf_counter() - began_s


def _serve(folder: Path, kernels: Kernels, device: str, pool_bytes: int) -> None:
    config = EngineConfig(
        device=device,
        dtype=kernels.dtype,
        kernels="auto" if device == "cuda" else "triton",
        load_format="dummy",
        mode="auto" if kernels.merges else "unmerged",
        pool_bytes=pool_bytes,
        max_batch_rows=16,
        max_step_tokens=512,
        uses_prefix_cache=False,
    )
    engine = Engine(folder, config)
    adapters = [engine.register_dummy_adapter(f"rank {rank}", rank) for rank in (16, 20)]
    if kernels.merges:
        engine.switch_weights(adapters[0])
        engine.switch_weights(None)
        return
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    if kernels.draws:
        sampling = replace(sampling, temperature=0.8, top_p=0.9, top_k=40, logprobs=True)
    prompt_tokens = _PROMPT_TOKENS if device == "cuda" else _TINY_PROMPT_TOKENS
    length = prompt_tokens if kernels.has_prompts else 1
    # the base alone launches other kernels than rows of adapters
    for adapter_ids in ([None, None], [None, *adapters]):
        rows = [
            Request(str(i), tuple(range(1, 1 + length)), adapter_id, sampling, i)
            for i, adapter_id in enumerate(adapter_ids)
        ]
        for result in engine.run(rows):
            assert result.error is None, result.error
