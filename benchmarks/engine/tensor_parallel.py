"""`python -m lorabatch.benchmarks.engine.tensor_parallel [RESULT.json]`: an engine of several processes beside others.

The same rows on the same cores: one engine with all threads, engines of one thread with a share of the rows each, and a
group whose members have one thread each; without adapters and with eight. Says how fast each is, what of the base's
weights each process has read, and what memory it took. Then how long members meet, beside `torch.distributed`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload, make_workload
from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.parallel.backend import GroupBackend
from lorabatch.engine.parallel.collectives import Collectives, Counters, memory_bytes, shared_memory
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams

NUM_ROWS, NUM_ADAPTERS, BATCH_ROWS = 64, 8, 64
# Numbers that members add up: one row of SmolLM2-135M, a batch of 64, a step of 512 tokens.
SIZES = (576, 64 * 576, 512 * 576)
_REPEATS = 200


def main(result_path: Path | None = None) -> dict[str, Any]:
    """Measure, print, and save if asked."""
    cores = len(os.sched_getaffinity(0))
    # files that another process has packed would not count as read
    os.environ["LORABATCH_WEIGHT_CACHE"] = "off"
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(base_model_folder(), Path(scratch), NUM_ROWS, NUM_ADAPTERS)
        systems = {
            f"one engine, {cores} threads": (1, 1, cores),
            f"{cores} engines, 1 thread each": (cores, 1, 1),
            f"one engine of {cores} processes, 1 thread each": (1, cores, cores),
        }
        found = {}
        for adapters, rows in (("no adapters", without_adapters(workload)), ("8 adapters", workload)):
            for name, shape in systems.items():
                found[f"{name}, {adapters}"] = measure(rows, *shape)
                print(f"{name}, {adapters}: {found[f'{name}, {adapters}']}", file=sys.stderr, flush=True)
    result = {
        "benchmark": "tensor parallel",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"cpu": cpu_name(), "cores": cores, "torch": torch.__version__},
        "workload": {"rows": NUM_ROWS, "adapters": NUM_ADAPTERS, "output_tokens": workload.output_tokens},
        "systems": found,
        "meetings_us": {str(members): meetings(members) for members in (2, 4)},
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def without_adapters(workload: EngineWorkload) -> EngineWorkload:
    """The same rows for the base model."""
    return replace(workload, adapters={}, rows=[replace(row, adapter="") for row in workload.rows])


def measure(workload: EngineWorkload, num_engines: int, processes: int, threads: int) -> dict[str, Any]:
    """Rows dealt out to so many engines, which start together."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(num_engines)
    results = context.SimpleQueue()
    engines = [
        context.Process(
            target=_serve, args=(workload, workload.rows[i::num_engines], processes, threads, start, results)
        )
        for i in range(num_engines)
    ]
    for engine in engines:
        engine.start()
    found = [results.get() for _ in engines]
    for engine in engines:
        engine.join()
    seconds = max(each["ended_s"] for each in found) - min(each["began_s"] for each in found)
    return {
        "tokens_per_s": round(workload.output_tokens / seconds, 1),
        "weights_read_mb": [round(n / 1e6, 1) for each in found for n in each["weight_bytes"]],
        "peak_mb": [round(n / 1e3) for each in found for n in each["peak_kb"]],
        "sums_per_step": found[0]["sums_per_step"],
    }


def _serve(
    workload: EngineWorkload, rows: list[BenchRow], processes: int, threads: int, start: Barrier, results: Any
) -> None:
    config = EngineConfig(
        mode="unmerged",
        tensor_parallel=processes,
        num_threads=threads,
        max_batch_rows=BATCH_ROWS,
        pool_bytes=1 << 30,
        uses_prefix_cache=False,
    )
    engine = Engine(Path(workload.model), config)
    ids = {"": None} | {name: _register(engine, name, Path(folder)) for name, folder in workload.adapters.items()}
    # every adapter is read, and every buffer touched, before the clock starts
    warm = [_request(f"warm {i}", replace(row, num_tokens=2), ids) for i, row in enumerate(rows)]
    list(engine.run(warm))
    backend = engine.backend
    group = backend if isinstance(backend, GroupBackend) else None
    sums, steps = (group.collectives.num_sums if group else 0), engine.telemetry().num_steps
    start.wait()
    began_s = time.monotonic()
    for result in engine.run([_request(str(i), row, ids) for i, row in enumerate(rows)]):
        assert result.error is None, result.error
    ended_s = time.monotonic()
    pids = [os.getpid(), *(group.members.pids if group else ())]
    weights = sum(file.stat().st_size for file in Path(workload.model).glob("*.safetensors"))
    results.put(
        {
            "began_s": began_s,
            "ended_s": ended_s,
            "weight_bytes": group.weight_bytes_of if group else (weights,),
            "peak_kb": [_peak_kb(pid) for pid in pids],
            "sums_per_step": (group.collectives.num_sums - sums) / (engine.telemetry().num_steps - steps)
            if group
            else 0,
        }
    )
    engine.close()


def _register(engine: Engine, name: str, folder: Path) -> str:
    identity = audit_adapter(folder, engine.model, name).identity_sha256
    assert identity is not None, f"{name} is refused"
    engine.register_adapter(identity, folder, name)
    return identity


def _request(request_id: str, row: BenchRow, ids: dict[str, str | None]) -> Request:
    sampling = SamplingParams(max_tokens=row.num_tokens, ignore_eos=True)
    return Request(request_id, tuple(row.prompt_token_ids), ids[row.adapter], sampling)


def _peak_kb(pid: int) -> int:
    """Most memory that a process has had, what it shares included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def meetings(num_members: int) -> dict[str, dict[str, float]]:
    """Microseconds of a sum over so many members, by numbers that each gives."""
    num_numbers = max(SIZES)
    memory = shared_memory("bench", memory_bytes(num_members, num_numbers))
    counters = Counters.create(num_members)
    pids = []
    for member in range(1, num_members):
        pid = os.fork()
        if pid == 0:
            _meet(member, num_members, memory, num_numbers, counters)
            os._exit(0)
        pids.append(pid)
    found = _meet(0, num_members, memory, num_numbers, counters)
    for pid in pids:
        os.waitpid(pid, 0)
    counters.close()
    os.close(memory)
    return found


def _meet(
    member: int, num_members: int, memory: int, num_numbers: int, counters: Counters
) -> dict[str, dict[str, float]]:
    from torch import distributed

    torch.set_num_threads(1)
    group = Collectives(member, num_members, memory, num_numbers, counters)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_500 + num_members)}
    distributed.init_process_group("gloo", rank=member, world_size=num_members)
    found = {}
    for size in SIZES:
        x = torch.ones(size)
        ways: dict[str, Callable[[torch.Tensor], object]] = {
            "shared memory": group.add_up,
            "gloo": distributed.all_reduce,
        }
        found[str(size)] = {way: _mean_us(add_up, x) for way, add_up in ways.items()}
    distributed.destroy_process_group()
    return found


def _mean_us(add_up: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    began_s = 0.0
    for i in range(_REPEATS + 10):
        if i == 10:
            began_s = time.perf_counter()
        add_up(x)
        x.fill_(1.0)
    return round((time.perf_counter() - began_s) / _REPEATS * 1e6, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
