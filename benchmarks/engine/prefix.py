"""`python -m lorabatch.benchmarks.engine.prefix`: rows with shared system prompts, with the prefix cache and without.

Both engines take turns on the same rows. Besides the time it says how much of the pool sharing by reference would have
saved: the ground for deciding whether more rows should be admitted than fit.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, SamplingParams

SYSTEM_TOKENS, USER_TOKENS, OUTPUT_TOKENS = 256, (16, 48), 16
NUM_ROWS, RANKS = 48, (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all rows."""

    #: Seconds from adding the rows to the last answer.
    seconds: float
    #: Share of the prompt tokens that were reused instead of computed.
    hit_rate: float
    #: Most pages of the pool in use after any step.
    peak_pages: int
    #: Pages of the pool.
    pages_total: int
    #: Request id -> token ids of the answer.
    tokens: dict[str, tuple[int, ...]]


def run_once(model: Path, adapters: list[Path], *, uses_prefix_cache: bool) -> Run:
    """Serve all rows; adapters are loaded inside the time, the base model is not."""
    engine = Engine(model, EngineConfig(mode="unmerged", uses_prefix_cache=uses_prefix_cache))
    ids = []
    for folder in adapters:
        adapter_id = audit_adapter(folder, engine.model, folder.name).identity_sha256
        assert adapter_id is not None
        engine.register_adapter(adapter_id, folder)
        ids.append(adapter_id)
    list(engine.run([Request("warm", (100, 101), None, SamplingParams(max_tokens=2, ignore_eos=True))]))
    before = engine.telemetry()
    engine.add(_requests(ids, engine.model.vocab_size))
    tokens: dict[str, tuple[int, ...]] = {}
    peak_pages = 0
    began = time.perf_counter()
    while engine.num_unfinished:
        tokens |= {result.request_id: result.token_ids for result in engine.step()}
        peak_pages = max(peak_pages, engine.telemetry().pages_used)
    seconds = time.perf_counter() - began
    after = engine.telemetry()
    computed = after.prompt_tokens - before.prompt_tokens
    hit_rate = after.reused_prompt_tokens / (computed + after.reused_prompt_tokens)
    return Run(seconds, hit_rate, peak_pages, after.pages_total, tokens)


def _requests(adapter_ids: list[str], vocab_size: int) -> list[Request]:
    """Each adapter's rows share a system prompt of their own, as a tenant's rows do."""
    rng = random.Random(0)
    systems = [[rng.randrange(100, vocab_size) for _ in range(SYSTEM_TOKENS)] for _ in adapter_ids]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    requests = []
    for i in range(NUM_ROWS):
        adapter = i % len(adapter_ids)
        user = [rng.randrange(100, vocab_size) for _ in range(rng.randint(*USER_TOKENS))]
        requests.append(Request(f"{i}", (*systems[adapter], *user), adapter_ids[adapter], sampling))
    return requests


def main(repeats: int = 3, result_path: Path | None = None) -> dict[str, Any]:
    """Run the benchmark, print its result, and save it if asked."""
    from lorabatch.demo.base_model import base_model_folder

    model = base_model_folder()
    runs: dict[bool, list[Run]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        config = Engine(model, EngineConfig(load_format="dummy", pool_bytes=1 << 20)).model
        adapters = [write_random_adapter(Path(scratch) / f"rank-{r}", config, r, seed=r) for r in RANKS]
        for _ in range(repeats):
            for uses_prefix_cache, of_kind in runs.items():
                of_kind.append(run_once(model, adapters, uses_prefix_cache=uses_prefix_cache))
    result = _result(model, runs)
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _result(model: Path, runs: dict[bool, list[Run]]) -> dict[str, Any]:
    with_cache, without = runs[True], runs[False]
    seconds = {kind: statistics.median(run.seconds for run in of_kind) for kind, of_kind in runs.items()}
    return {
        "benchmark": "prefix cache",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "workload": {
            "model": model.name,
            "rows": NUM_ROWS,
            "adapters": len(RANKS),
            "system_tokens": SYSTEM_TOKENS,
            "user_tokens": USER_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        "seconds_with": [round(run.seconds, 2) for run in with_cache],
        "seconds_without": [round(run.seconds, 2) for run in without],
        "times_faster": round(seconds[False] / seconds[True], 2),
        "hit_rate": round(with_cache[-1].hit_rate, 3),
        "rows_equal": sum(tokens == without[-1].tokens[i] for i, tokens in with_cache[-1].tokens.items()),
        "peak_pages_with": with_cache[-1].peak_pages,
        "peak_pages_without": without[-1].peak_pages,
        "pages_total": without[-1].pages_total,
    }


if __name__ == "__main__":
    main(result_path=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
