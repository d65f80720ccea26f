"""`python -m lorabatch.benchmarks.gpu.reading [RESULT]`: what the host does for each adapter that a GPU is to serve.

An adapter of rank 16 on all linear layers is read from its files, hashed, packed for the pool and entered in the table
of LoRA kernels, by the functions that engines on GPUs call. Adapters are written anew and are in the page cache; the
base has a configuration and no weights. Each part by itself in one thread, then adapters per second by
`AdapterLoader` with several threads. Of all repeats the shortest counts: other programs only add to it. Without a GPU
host memory is not pinned, the table is in host memory, and nothing is copied.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B, MODELS
from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import read_model_config
from lorabatch.engine.memory.loader import AdapterLoader
from lorabatch.engine.memory.packed import PackedAdapter, pack_adapter, read_packed
from lorabatch.engine.memory.pool import page_layout
from lorabatch.engine.memory.registry import AdapterRegistry
from lorabatch.engine.memory.residency import ResidentAdapter
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft import AdapterAudit, audit_adapter
from lorabatch.engine.peft.content import content_sha256
from lorabatch.engine.peft.folder import open_folder
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.peft.tensor_file import TensorReader
from lorabatch.engine.peft.weights import load_adapter
from lorabatch.engine.runner.gpu_adapters import GpuAdapters

_POOL = torch.bfloat16
_PAGE_TOKENS = 16
_TABLE_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """Sizes of the measurement: adapters, threads and repeats."""

    #: LoRA rank of the adapters.
    rank: int = 16
    #: Number format of the adapters' files.
    stored: torch.dtype = torch.float32
    #: Number of adapters.
    num_adapters: int = 4
    #: Numbers of threads with which `AdapterLoader` is measured.
    threads: tuple[int, ...] = (1, 2)
    #: Times that everything is measured; the fastest counts.
    repeats: int = 8


def measure_reading(
    folder: Path, reading: Reading, device: torch.device, deadline: Deadline, save: Callable[[Any], None]
) -> dict[str, float]:
    """Milliseconds of each part for one adapter, and adapters per second by number of threads. `folder`: of the model;
    adapters are written beside it."""
    if deadline.has_passed:
        return {}
    model = read_model_config(folder)
    registry = AdapterRegistry(model, _POOL, device, page_layout(model, _PAGE_TOKENS, 2).page_elements)
    paths = [
        write_random_adapter(folder.parent / f"read{i}", model, reading.rank, seed=i, dtype=reading.stored)
        for i in range(reading.num_adapters)
    ]
    audits = [audit_adapter(path, model, path.name) for path in paths]
    ids = [_registered(registry, audit) for audit in audits]
    found: dict[str, float] = {"file_bytes": (paths[0] / "adapter_model.safetensors").stat().st_size}
    for repeat in range(reading.repeats):
        if not deadline.has_passed:
            _keep_shortest(found, _parts(audits[repeat % len(audits)], model, device))
            save(found)
        for num_threads in reading.threads:
            if not deadline.has_passed:
                name = f"adapters_per_s_{num_threads}_threads"
                found[name] = max(found.get(name, 0.0), _adapters_per_s(registry, ids, num_threads))
                save(found)
    return found


def _registered(registry: AdapterRegistry, audit: AdapterAudit) -> str:
    assert audit.content_sha256 is not None, f"the random adapter {audit.folder} was refused"
    registry.register(audit.content_sha256, audit.folder, audit.name)
    return audit.content_sha256


def _keep_shortest(found: dict[str, float], measured: dict[str, float]) -> None:
    for name, value in measured.items():
        found[name] = min(found.get(name, value), value)


def _parts(audit: AdapterAudit, model: ModelConfig, device: torch.device) -> dict[str, float]:
    """Milliseconds of what a loader thread does with one adapter, and of the step thread's part."""
    took: dict[str, float] = {}
    pool = _POOL, page_layout(model, _PAGE_TOKENS, 2).page_elements

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        took[name] = (time.perf_counter() - began_s) * 1e3

    with timed("headers_ms"):
        entries = open_folder(audit.folder).entries
    with TensorReader(audit.folder) as reader, timed("read_ms"):
        data = reader.read_all(entries.values())
    with timed("hash_ms"):
        content_sha256(audit.changes, entries, data.__getitem__)
    del data
    with timed("read_and_hash_ms"):
        weights = load_adapter(audit, "cpu")
    with timed("pack_ms"):
        packed = pack_adapter(weights, model, *pool, in_panels=False, device=device)
    del weights, packed
    with timed("read_hash_and_pack_ms"):
        packed = read_packed(audit, audit.content_sha256 or "", model, *pool, in_panels=False, device=device)
    return took | _table_row(packed, model, device)


def _table_row(packed: PackedAdapter, model: ModelConfig, device: torch.device) -> dict[str, float]:
    """Milliseconds of the step thread for an adapter that a step uses for the first time: where none of its shapes came
    before, and otherwise."""
    numbers = packed.numbers.to(device)
    adapters = GpuAdapters(numbers, model, 2 * _TABLE_REPEATS, 2 * _TABLE_REPEATS * len(model.linear_shapes()))
    times = []
    layout = replace(packed.layout)  # another, as far as the table can tell
    for order in range(_TABLE_REPEATS):
        resident = ResidentAdapter(f"{order}", order, numbers, np.arange(layout.num_pages), layout)
        began_s = time.perf_counter()
        adapters.rows_of([resident])
        times.append((time.perf_counter() - began_s) * 1e3)
    return {"first_table_row_ms": times[0], "table_row_ms": min(times)}


def _adapters_per_s(registry: AdapterRegistry, adapter_ids: Sequence[str], num_threads: int) -> float:
    def read(adapter_id: str) -> PackedAdapter:
        return registry.load_packed(adapter_id)

    loader = AdapterLoader(read, 0, num_threads)
    began_s = time.perf_counter()
    loader.prefetch(adapter_ids)
    for adapter_id in adapter_ids:
        loader.take(adapter_id)
    return len(adapter_ids) / (time.perf_counter() - began_s)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.gpu.reading", description=__doc__)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--model", choices=sorted(MODELS), default=LLAMA_3_8B.name)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = provenance(["torch", "numpy"]) | {"model": options.model, "repeats": options.repeats}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for stored in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as name:
            folder = write_model_folder(Path(name) / "model", MODELS[options.model])
            reading = Reading(stored=stored, threads=tuple(options.threads), repeats=options.repeats)
            found[f"{stored}"] = measure_reading(folder, reading, device, Deadline.after(3600.0), lambda _: None)
    text = json.dumps(found, indent=1)
    print(text)
    if options.result:
        options.result.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
