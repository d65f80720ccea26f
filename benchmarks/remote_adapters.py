"""How long a job takes whose adapters are in a store with slow requests, beside the same job with adapters on disk.

python -m lorabatch.benchmarks.remote_adapters [--adapters 100 300] [--delay 0.05] [--repeats 1] [--save FILE]

Runs `lorabatch run` as a user does, on the demo's base model with one worker: each adapter answers a few rows. The
store is moto's S3 server, which waits before each request, on the same cores; its processor seconds are named. The
client's requests and bytes are those until `job.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import read_model_config
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server

_ROWS_PER_ADAPTER = 2
_MAX_TOKENS = 16
_POLL_S = 0.01
_SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> int:
    """Adapters of random weights on all linear layers, float32; returns the bytes of one."""
    config = read_model_config(model)
    shapes = {name: shape for name, shape in config.linear_shapes().items() if name.rpartition(".")[2] in _SITES}
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(rank, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(outputs, rank, generator=generator)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_SITES), "bias": "none"}
    first = next(iter(tensors))
    for number in range(count):
        adapter = folder / f"tenant-{number:04d}"
        adapter.mkdir(parents=True)
        tensors[first][0, 0] = number + 1.0  # no two have one content
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return sum(path.stat().st_size for path in adapter.iterdir())


def write_rows(path: Path, count: int) -> int:
    """Rows in the order in which they came, not by adapter."""
    names = [f"tenant-{number % count:04d}" for number in range(count * _ROWS_PER_ADAPTER)]
    random.Random(0).shuffle(names)
    prompts = [f"Message {number}: please tell me what to do next." for number in range(len(names))]
    pq.write_table(pa.table({"id": range(len(names)), "adapter": names, "prompt": prompts}), path)
    return len(names)


@contextmanager
def slow_store(folder: Path, delay_s: float) -> Iterator[tuple[Bucket, Path]]:
    """An S3 server that waits before each request, and its log."""
    log = folder / "requests.log"
    with s3_server(folder, DELAY_S=str(delay_s), LOG=str(log)) as bucket:
        bucket.fs.mkdir("bucket")
        yield bucket, log


def measured(folder: Path, options: Mapping[str, Any], num_rows: int, cache: Path) -> dict[str, float]:
    """Seconds from the command to `job.json`, to the first answer and to the end, rows per second, and processor
    seconds of all processes of the job.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    words = [f"--{name}={value}" for name, value in options.items()]
    began_s = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "lorabatch", "run", f"--output={output}", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    state = output / "_lorabatch"
    found: dict[str, float] = {}
    while process.poll() is None:
        if "job_json_s" not in found and (state / "job.json").exists():
            found["job_json_s"] = time.time() - began_s
        if "first_answer_s" not in found and (any(state.glob("wip/*/*")) or any(output.glob("part-*"))):
            found["first_answer_s"] = time.time() - began_s
        time.sleep(_POLL_S)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read().decode()[-2000:]
    total_s = time.time() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    errors = json.loads((state / "summary.json").read_text())["errors"]
    assert not errors, errors
    return found | {"total_s": total_s, "rows_per_s": num_rows / total_s, "cpu_s": cpu_s, "began_s": began_s}


def store_cpu_s() -> float:
    """Processor seconds of the store's server so far."""
    servers = [child for child in psutil.Process().children() if any("s3_server" in word for word in child.cmdline())]
    assert len(servers) == 1, f"{len(servers)} servers"
    times = servers[0].cpu_times()
    return float(times.user + times.system)


def traffic(log: Path, began_s: float, job_json_s: float) -> dict[str, int]:
    """Requests and bytes until `job.json`, and after it."""
    found = dict.fromkeys(("client_requests", "client_bytes", "worker_requests", "worker_bytes"), 0)
    for line in log.read_text().splitlines():
        at_s, _, _, num_bytes = line.split(" ")
        if float(at_s) >= began_s:
            who = "client" if float(at_s) < began_s + job_json_s else "worker"
            found[f"{who}_requests"] += 1
            found[f"{who}_bytes"] += int(num_bytes)
    return found


def compared(folder: Path, model: Path, count: int, rank: int, delay_s: float, repeats: int) -> dict[str, Any]:
    """The two jobs, in turns."""
    adapters, rows = folder / "adapters", folder / "rows.parquet"
    num_bytes = write_adapters(adapters, model, count, rank)
    num_rows = write_rows(rows, count)
    given: dict[str, Any] = {"model": model, "input": rows, "workers": 1, "max-tokens": _MAX_TOKENS, "temperature": 0}
    results: dict[str, list[dict[str, float]]] = {"disk": [], "s3": []}
    with slow_store(folder, delay_s) as (bucket, log):
        remote = bucket.put(adapters, "adapters")
        places: dict[str, dict[str, Any]] = {
            "disk": {"adapters": adapters},
            "s3": {"adapters": remote, "storage-options": json.dumps(bucket.options)},
        }
        measured(folder, given | places["disk"], num_rows, folder / "cache")  # packs the base's weights
        for _ in range(repeats):
            for name, place in places.items():
                shutil.rmtree(folder / "cache" / "lorabatch" / "fetched", ignore_errors=True)
                before_s = store_cpu_s()
                found = measured(folder, given | place, num_rows, folder / "cache")
                if name == "s3":
                    found |= traffic(log, found["began_s"], found["job_json_s"])
                    found["store_cpu_s"] = store_cpu_s() - before_s
                results[name].append(found)
    means = {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0] if key != "began_s"}
        for name, runs in results.items()
    }
    ratio = round(means["s3"]["total_s"] / means["disk"]["total_s"], 2)
    later = round(means["s3"]["first_answer_s"] - means["disk"]["first_answer_s"], 2)
    about = {"adapters": count, "bytes_of_one": num_bytes, "rows": num_rows, "delay_s": delay_s}
    return about | means | {"seconds_ratio": ratio, "first_answer_later_s": later}


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--rank", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for each request")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    model = base_model_folder()
    runs = []
    for count in arguments.adapters:
        with tempfile.TemporaryDirectory() as folder:
            found = compared(Path(folder), model, count, arguments.rank, arguments.delay, arguments.repeats)
        print(json.dumps(found, indent=1), flush=True)
        runs.append(found)
    if arguments.save:
        arguments.save.write_text(
            json.dumps({"provenance": provenance(("torch", "s3fs", "moto")), "runs": runs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
