"""Runs an engine's steps without a GPU and says which kernels they compile; prints JSON.

    TRITON_INTERPRET=0 python tests/engine/runner/steps_without_gpu.py note|compile KERNELS

KERNELS: fields of `EngineKernels` as JSON, and the engine's `mode`. The engine is real, on the CPU with random weights;
a driver that only names its target stands in for the GPU's, and kernels are not launched: what they would write is
zeros. `note`: nothing is compiled, `missing` are kernels that steps launch and `note_kernels` does not name. `compile`:
kernels are compiled as they are first launched, `missing` are those that were not in Triton's cache, `found` are those
that were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from lorabatch.engine.config import EngineConfig, Mode
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner import backend
from lorabatch.engine.runner.compile_ahead import EngineKernels
from lorabatch.engine.runner.compile_process import compile_for, note_kernels

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.7, top_k=5, top_p=0.9, logprobs=True)
PENALISED = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.7, frequency_penalty=0.5)


def main() -> None:
    """Run steps, print what they launched."""
    settings = json.loads(sys.argv[2])
    mode: Mode = settings.pop("mode", "auto")
    kernels = EngineKernels(**settings, is_exact=mode == "exact")
    launched: set[str] = set()
    found: list[str] = []
    missing: list[str] = []

    def note(*, key: str, fn: Any, **others: Any) -> bool:
        launched.add(f"{fn.module}.{fn.name} {key}")
        return True

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        (found if cache_hit else missing).append(src.name)

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    if sys.argv[1] == "note":
        expected = note_kernels(kernels).keys()
        triton.knobs.runtime.jit_cache_hook = note
        run_engine(kernels, mode)
        missing, found = sorted(launched - expected), sorted(launched & expected)
    else:
        compile_for(kernels.capability)
        triton.knobs.compilation.listener = listen
        JITFunction.run = compile_only
        run_engine(kernels, mode)
    json.dump({"missing": missing, "found": found}, sys.stdout)


def run_engine(kernels: EngineKernels, mode: Mode) -> None:
    """Prompts and decode rows, short and long, of the base and of adapters of several ranks; greedy, drawn, and changed
    by the host; merges."""
    backend.is_interpreted = lambda: True  # type: ignore[attr-defined]
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    config = EngineConfig(
        device="cpu",
        dtype=kernels.dtype,
        kernels="triton",
        load_format="dummy",
        mode=mode,
        base_quantization=kernels.base_quantization,
        pool_bytes=8 << 20,
        max_batch_rows=12,
        max_step_tokens=200,
    )
    engine = Engine(Path(kernels.model_folder), config)
    ids = [None, *(engine.register_dummy_adapter(f"rank {rank}", rank) for rank in (3, 16, 20, 64))]
    for lengths in ([1], [5, 90, 17], [600, *range(2, 12)]):
        for sampling in (GREEDY, DRAWN, PENALISED):
            for adapters in ([None], ids):
                rows = [
                    Request(str(row), tuple(1 + i % 40 for i in range(length)), adapters[row % len(adapters)], sampling)
                    for row, length in enumerate(lengths)
                ]
                errors = [result.error for result in engine.run(rows) if result.error]
                assert not errors, errors
    if mode == "auto":
        for adapter_id in (ids[1], ids[4], None):
            engine.switch_weights(adapter_id)


if __name__ == "__main__":
    main()
