"""`python -m lorabatch.benchmarks.engine.many_adapters [RESULT.json]`: 1,000 adapters through a pool that holds 50.

A small random base model, rows of all adapters in turn. Says how often adapters were read and loaded, how long steps
waited for them, and whether all rows are what an engine answers that holds all adapters.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, SamplingParams

NUM_ADAPTERS, HELD, ROWS_EACH, RANK = 1000, 50, 4, 4
PROMPT_TOKENS, OUTPUT_TOKENS, BATCH_ROWS = 16, 16, 32
_SMALL = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def small_base(folder: Path) -> Path:
    """The demo base's tokenizer and vocabulary under a configuration of four narrow layers; weights are made up."""
    base = base_model_folder()
    folder.mkdir()
    for file in base.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config | _SMALL), encoding="utf-8")
    return folder


def serve(model: Path, adapters: dict[str, Path], requests: list[Request], pool_bytes: int) -> dict[str, Any]:
    """One pass over all rows: seconds, telemetry and the tokens."""
    config = EngineConfig(
        mode="unmerged",
        num_threads=1,
        load_format="dummy",
        pool_bytes=pool_bytes,
        max_batch_rows=BATCH_ROWS,
        host_tier_bytes=0,
    )
    engine = Engine(model, config)
    began_s = time.perf_counter()
    for adapter_id, folder in adapters.items():
        engine.register_adapter(adapter_id, folder)
    registered_s = time.perf_counter()
    engine.add(requests)
    tokens: dict[str, tuple[int, ...]] = {}
    most_resident = 0
    while engine.num_unfinished:
        for result in engine.step():
            assert result.error is None, result.error
            tokens[result.request_id] = result.token_ids
        most_resident = max(most_resident, len(engine.telemetry().resident_adapter_ids))
    engine.check_integrity()
    ended_s = time.perf_counter()
    return {
        "register_s": registered_s - began_s,
        "serve_s": ended_s - registered_s,
        "most_resident": most_resident,
        "telemetry": engine.telemetry(),
        "tokens": tokens,
    }


def main(result_path: Path | None = None) -> dict[str, Any]:
    """Run both engines, print what was found, and save it if asked."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        folder = small_base(Path(scratch) / "base")
        model = read_model_config(folder)
        adapters: dict[str, Path] = {}
        for i in range(NUM_ADAPTERS):
            path = write_random_adapter(Path(scratch) / f"{i}", model, RANK, seed=i, deviations=(0.2, 0.2))
            identity = audit_adapter(path, model, path.name).identity_sha256
            assert identity is not None
            adapters[identity] = path
        prompts = [tuple(rng.randrange(100, 40000) for _ in range(PROMPT_TOKENS)) for _ in range(ROWS_EACH)]
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        requests = [Request(f"{turn}-{a}", p, a, sampling) for turn, p in enumerate(prompts) for a in adapters]
        layout = page_layout(model, 16, 4)
        numbers = sum(sum(shape) * RANK for name, shape in model.linear_shapes().items() if name != "lm_head")
        adapter_pages = layout.pages_for_elements(numbers)
        row_pages = 4 * BATCH_ROWS
        page_bytes = layout.page_elements * 4
        few = serve(folder, adapters, requests, (HELD * adapter_pages + row_pages) * page_bytes)
        roomy = serve(folder, adapters, requests, (NUM_ADAPTERS * adapter_pages + 2 * row_pages) * page_bytes)
    said = few["telemetry"]
    result = {
        "benchmark": "many adapters",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "workload": {"adapters": NUM_ADAPTERS, "rows": len(requests), "rank": RANK, "output_tokens": OUTPUT_TOKENS},
        "most_resident": few["most_resident"],
        "most_resident_in_roomy": roomy["most_resident"],
        "rows_equal": sum(few["tokens"][row] == tokens for row, tokens in roomy["tokens"].items()),
        "loads": said.adapters.loads,
        "reads": said.adapters.disk_reads,
        "register_s": round(few["register_s"], 2),
        "serve_s": round(few["serve_s"], 2),
        "stall_s": round(said.adapters.stall_s, 3),
        "stall_share": round(said.adapters.stall_s / few["serve_s"], 4),
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
