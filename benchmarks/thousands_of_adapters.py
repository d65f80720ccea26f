"""How a job with thousands of adapters in a store goes: rows a second, what steps waited, where bytes came from.

python -m lorabatch.benchmarks.thousands_of_adapters [--adapters 2000] [--rows 6000] [--workers 2 4] [--save FILE]

Adapters of ranks 8 to 64 on all layers of a small random base, about 1 MB each, are on moto's S3 server, which waits 50
ms before each request, on the same cores. Rows ask for them evenly or by Zipf's law. The pool of an engine has room for
40 adapters. Each job is `lorabatch run`, as a user starts it, with the costs of `lorabatch profile`. The last job has a
limit of disk of a tenth of all adapters, and the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from lorabatch.benchmarks.engine.many_adapters import small_base
from lorabatch.benchmarks.provenance import provenance
from lorabatch.benchmarks.remote_adapters import measured, slow_store, store_cpu_s, traffic
from lorabatch.engine.config import read_model_config
from lorabatch.engine.models.load import dummy_weights
from lorabatch.engine.peft.random import write_random_adapter

_RANKS = (8, 16, 32, 64)
_MAX_TOKENS, _POOL_ADAPTERS, _ZIPF = 16, 40, 1.0
_KEYS = ("pool_hits", "loads", "host_loads", "disk_reads", "peer_fetches", "storage_fetches", "stall_s", "step_s")


def write_base(folder: Path) -> Path:
    """A small base model with random weights."""
    base = small_base(folder)
    weights = dummy_weights(read_model_config(base), torch.float32, torch.device("cpu"))
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    return base


def write_adapters(folder: Path, base: Path, count: int) -> int:
    """Random adapters of all ranks in turn; returns the bytes of all."""
    model = read_model_config(base)
    for number in range(count):
        write_random_adapter(folder / f"tenant-{number:04d}", model, _RANKS[number % len(_RANKS)], seed=number)
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def write_rows(path: Path, num_adapters: int, num_rows: int, *, is_even: bool) -> None:
    """Rows in the order in which they came; of a Zipf law, the adapters of each rank are as popular as the others'."""
    chance = random.Random(0)
    weights = [1.0 if is_even else (number + 1) ** -_ZIPF for number in range(num_adapters)]
    # each adapter has a row
    numbers = [*range(num_adapters), *chance.choices(range(num_adapters), weights, k=num_rows - num_adapters)]
    chance.shuffle(numbers)
    prompts = [f"Message {number}: please tell me what to do next." for number in range(num_rows)]
    names = [f"tenant-{number:04d}" for number in numbers]
    pq.write_table(pa.table({"id": range(num_rows), "adapter": names, "prompt": prompts}), path)


def answers(output: Path) -> dict[int, str]:
    """Answers by row."""
    table = ds.dataset([str(path) for path in sorted(output.glob("part-*.parquet"))]).to_table(["id", "completion"])
    return dict(zip(table["id"].to_pylist(), table["completion"].to_pylist(), strict=True))


def bytes_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(folder: Path, options: Mapping[str, Any], num_rows: int, log: Path) -> dict[str, Any]:
    """One job with an empty cache of adapters."""
    copies = folder / "cache" / "lorabatch" / "adapter-copies"
    shutil.rmtree(copies, ignore_errors=True)
    before_s = store_cpu_s()
    found: dict[str, Any] = dict(measured(folder, options, num_rows, folder / "cache"))
    found |= traffic(log, found.pop("began_s"), found["job_json_s"])
    found["store_cpu_s"] = store_cpu_s() - before_s
    summary = json.loads((folder / "output" / "_lorabatch" / "summary.json").read_text())
    found |= {key: summary["adapter_use"][key] for key in _KEYS}
    found |= {"predicted_s": summary["predicted_s"], "working_s": summary["working_s"]}
    found["plan_over_run"] = summary["predicted_s"] / summary["working_s"]
    found["disk_bytes"] = bytes_of(copies)
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for each request")
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, adapters, rows = write_base(folder / "base"), folder / "adapters", folder / "rows.parquet"
        num_bytes = write_adapters(adapters, base, chosen.adapters)
        pool_bytes = int(1.2 * _POOL_ADAPTERS * num_bytes / chosen.adapters)
        own = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        for workers in chosen.workers:
            words = ["profile", f"--model={base}", f"--workers={workers}", "--max-seconds=60"]
            subprocess.run(
                [sys.executable, "-m", "lorabatch", *words], env=own, check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        with slow_store(folder, chosen.delay) as (bucket, log):
            given: dict[str, Any] = {
                "model": base, "input": rows, "adapters": bucket.put(adapters, "adapters"),
                "storage-options": json.dumps(bucket.options), "max-tokens": _MAX_TOKENS, "temperature": 0,
                "pool-bytes": pool_bytes,
            }  # fmt: skip
            expected: dict[int, str] = {}
            for is_even in (False, True):
                write_rows(rows, chosen.adapters, chosen.rows, is_even=is_even)
                limits = [{"workers": workers} for workers in chosen.workers]
                limits += [] if is_even else [limits[0] | {"adapter-disk-bytes": num_bytes // 10}]
                expected = {}
                for limit in limits:
                    found = measure(folder, given | limit, chosen.rows, log)
                    told = answers(folder / "output")
                    assert told == (expected or told), "other answers"
                    expected = told
                    runs.append({"rows": "even" if is_even else "Zipf"} | limit | found)
                    print(json.dumps(runs[-1]), flush=True)
    about = {"adapters": chosen.adapters, "bytes_of_all": num_bytes, "rows": chosen.rows, "pool_bytes": pool_bytes}
    if chosen.save:
        result = {"provenance": provenance(("torch", "s3fs", "moto")), **about, "delay_s": chosen.delay, "runs": runs}
        chosen.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
