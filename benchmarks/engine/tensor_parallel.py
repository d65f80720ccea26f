"""`python -m lorabatch.benchmarks.engine.tensor_parallel [RESULT.json]`: engines of several processes beside others.

The same rows on the same cores, without adapters and with eight: one engine with all threads, engines of one thread
with a share of the rows each, and groups of two and of four processes of one thread. Says how fast each is, how often
the members of a group meet, what of the base's weights each process has read, and how much memory it has. Then how long
members meet, beside `torch.distributed`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload, make_workload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.parallel.backend import GroupBackend
from lorabatch.engine.parallel.collectives import Collectives, event_counters, shared_memory, shared_memory_bytes
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams

NUM_ROWS, NUM_ADAPTERS, BATCH_ROWS = 64, 8, 64
NUM_REPEATS = 3
# Numbers that members add up: one row of SmolLM2-135M, a batch of 64, a step of 512 tokens.
SIZES = (576, 64 * 576, 512 * 576)
_MEETINGS = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_engines` engines, each of `processes` processes, which share `threads` threads."""

    num_engines: int
    processes: int
    threads: int


def main(result_path: Path | None = None) -> dict[str, Any]:
    """Measure, print, and save if asked."""
    cores = len(os.sched_getaffinity(0))
    shapes = {
        f"one engine, {cores} threads": Shape(1, 1, cores),
        f"{cores} engines, 1 thread each": Shape(cores, 1, 1),
        "one engine of 2 processes": Shape(1, 2, 2),
        "one engine of 4 processes": Shape(1, 4, 4),
    }
    # files that another process has packed would not count as read
    os.environ["LORABATCH_WEIGHT_CACHE"] = "off"
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(base_model_folder(), Path(scratch), NUM_ROWS, NUM_ADAPTERS)
        systems = compare(workload, shapes)
    result = provenance(("torch",)) | {
        "benchmark": "tensor parallel",
        "workload": {"rows": NUM_ROWS, "adapters": NUM_ADAPTERS, "output_tokens": workload.output_tokens},
        "systems": systems,
        "meetings_us": {str(members): meetings(members) for members in (2, 4)},
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def compare(workload: EngineWorkload, shapes: dict[str, Shape]) -> dict[str, Any]:
    """All systems take turns, first with the base model's rows and then with those of adapters. `relative`: to the
    first system in the same repeat."""
    plain = [replace(row, adapter="") for row in workload.rows]
    found: dict[str, Any] = {name: {} for name in shapes}
    num_layers = read_model_config(Path(workload.model)).num_layers
    with ExitStack() as stack:
        systems = {name: stack.enter_context(closing(System(workload, shape))) for name, shape in shapes.items()}
        for name, system in systems.items():
            found[name] = {"weights_read_mb": system.weights_read_mb, "empty_mb": system.empty_mb}
        for adapters, rows in (("no adapters", plain), (f"{NUM_ADAPTERS} adapters", workload.rows)):
            runs: dict[str, list[Run]] = {name: [] for name in shapes}
            for system in systems.values():
                # every adapter is read, and every buffer touched, before the clock starts
                system.serve([replace(row, num_tokens=2) for row in rows])
            for _ in range(NUM_REPEATS):
                for name, system in systems.items():
                    runs[name].append(system.serve(rows))
                    print(f"{name}, {adapters}: {runs[name][-1]}", file=sys.stderr, flush=True)
            first = next(iter(runs.values()))
            for name, system in systems.items():
                seconds = [run.seconds for run in runs[name]]
                relative = [one.seconds / run.seconds for one, run in zip(first, runs[name], strict=True)]
                found[name][adapters] = {
                    "tokens_per_s": round(workload.output_tokens / statistics.median(seconds), 1),
                    "seconds": [round(each, 2) for each in seconds],
                    "relative": round(statistics.median(relative), 3),
                    "relatives": [round(each, 3) for each in relative],
                    "meetings_per_layer": round((runs[name][0].sums_per_step - 1) / num_layers, 3)
                    if runs[name][0].sums_per_step
                    else 0,
                    "memory_mb": system.memory_mb(),
                }
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all rows. `sums_per_step`: meetings of a group's members to add up, of which one is not a layer's:
    that of the embedding."""

    seconds: float
    sums_per_step: float


class System:
    """Engines that share rows out, each in a process of its own that stays between runs.

    `weights_read_mb`: of each process of each engine. `empty_mb`: memory of a process before it has a model.
    """

    def __init__(self, workload: EngineWorkload, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._engines = []
        for _ in range(shape.num_engines):
            ours, theirs = context.Pipe()
            engine = context.Process(target=_serve, args=(workload.model, workload.adapters, shape, theirs))
            engine.start()
            theirs.close()
            self._pipes.append(ours)
            self._engines.append(engine)
        ready = [pipe.recv() for pipe in self._pipes]
        self.weights_read_mb = [round(n / 1e6, 1) for weight_bytes, _ in ready for n in weight_bytes]
        self.empty_mb = round(ready[0][1] / 1e3)

    def serve(self, rows: Sequence[BenchRow]) -> Run:
        """Deal the rows out and wait for all of them."""
        began_s = time.monotonic()
        for place, pipe in enumerate(self._pipes):
            pipe.send(list(rows[place :: len(self._pipes)]))
        sums_per_step = [pipe.recv() for pipe in self._pipes]
        return Run(time.monotonic() - began_s, sums_per_step[0])

    def memory_mb(self) -> list[int]:
        """MB of anonymous and shared memory, of each process of each engine. Memory that several processes share is
        divided evenly among them."""
        for pipe in self._pipes:
            pipe.send([])
        return [round(kb / 1e3) for pipe in self._pipes for kb in pipe.recv()]

    def close(self) -> None:
        """End the engines."""
        for pipe, engine in zip(self._pipes, self._engines, strict=True):
            pipe.close()
            engine.join()


def _serve(model: str, adapters: dict[str, str], shape: Shape, pipe: Connection) -> None:
    """An engine's process: serves lists of rows until the other end is closed. An empty one asks for memory."""
    empty_kb = _memory_kb(os.getpid())
    config = EngineConfig(
        mode="unmerged",
        tensor_parallel=shape.processes,
        num_threads=shape.threads,
        max_batch_rows=BATCH_ROWS,
        pool_bytes=1 << 30,
        uses_prefix_cache=False,
    )
    with closing(Engine(Path(model), config)) as engine:
        ids = {"": None} | {name: _register(engine, name, Path(folder)) for name, folder in adapters.items()}
        group = engine.backend if isinstance(engine.backend, GroupBackend) else None
        whole = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        pipe.send(((whole,) if group is None else group.weight_bytes_of, empty_kb))
        while True:
            try:
                rows = pipe.recv()
            except EOFError:
                return
            if not rows:
                pipe.send([_memory_kb(pid) for pid in (os.getpid(), *(group.members.pids if group else ()))])
                continue
            sums, steps = (group.collectives.num_sums if group else 0), engine.telemetry().num_steps
            for result in engine.run([_request(str(i), row, ids) for i, row in enumerate(rows)]):
                assert result.error is None, result.error
            sums = (group.collectives.num_sums if group else 0) - sums
            pipe.send(sums / (engine.telemetry().num_steps - steps))


def _register(engine: Engine, name: str, folder: Path) -> str:
    identity = audit_adapter(folder, engine.model, name).identity_sha256
    assert identity is not None, f"{name} is refused"
    engine.register_adapter(identity, folder, name)
    return identity


def _request(request_id: str, row: BenchRow, ids: dict[str, str | None]) -> Request:
    sampling = SamplingParams(max_tokens=row.num_tokens, ignore_eos=True)
    return Request(request_id, tuple(row.prompt_token_ids), ids[row.adapter], sampling)


def _memory_kb(pid: int) -> int:
    """kB of a process's anonymous and shared memory. Memory that it shares with others counts with its part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def meetings(num_members: int) -> dict[str, dict[str, float]]:
    """Mean microseconds in which `num_members` processes add up their tensors, by numbers in a tensor, then by way."""
    num_numbers = max(SIZES)
    memory = shared_memory("bench", shared_memory_bytes(num_members, num_numbers))
    counters = event_counters(num_members)
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
    for descriptor in (*counters, memory):
        os.close(descriptor)
    return found


def _meet(
    member: int, num_members: int, memory: int, num_numbers: int, counters: tuple[int, ...]
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
    for i in range(_MEETINGS + 10):
        if i == 10:
            began_s = time.perf_counter()
        add_up(x)
        x.fill_(1.0)
    return round((time.perf_counter() - began_s) / _MEETINGS * 1e6, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
