"""The peers' workloads on our engine: output tokens per second over prompts and answers together, as theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """Rows that a peer serves too; all are there at the start."""

    #: Name of the peer.
    peer: str
    #: Number of rows.
    batch: int
    #: Tokens of each prompt.
    prompt_tokens: int
    #: Tokens of each answer.
    num_tokens: int
    #: Number of adapters of rank 16, which rows have in turn; 0: the base alone.
    adapters: int


def measure_ours(
    folder: Path,
    workloads: tuple[PeerWorkload, ...],
    device: torch.device,
    pool_bytes: int | None,
    deadline: Deadline,
    save: Callable[[Any], None],
) -> list[dict[str, Any]]:
    """One row for each; a run before it compiles, makes adapters resident and captures graphs."""
    names = [f"{workload.peer}, {workload.adapters} adapters" for workload in workloads]
    if deadline.has_passed:
        deadline.left_out.extend(names)
        return []
    config = EngineConfig(
        device=device.type,
        kernels="triton" if device.type == "cpu" else "auto",
        load_format="dummy",
        mode="unmerged",
        max_batch_rows=max(workload.batch for workload in workloads),
        pool_bytes=pool_bytes,
        host_tier_bytes=0,
        uses_prefix_cache=False,
    )
    engine = Engine(folder, config)
    rows: list[dict[str, Any]] = []
    for name, workload in zip(names, workloads, strict=True):
        for is_timed in (False, True):
            if not deadline.allows(name):
                break
            began_s = time.perf_counter()
            for result in engine.run(_requests(engine, workload)):
                assert result.error is None, result.error
            seconds = time.perf_counter() - began_s
            if is_timed:
                rows.append(asdict(workload) | {"tokens_per_s": workload.batch * workload.num_tokens / seconds})
                save(rows)
    return rows


def _requests(engine: Engine, workload: PeerWorkload) -> list[Request]:
    adapters = [engine.register_dummy_adapter(f"{number}", 16) for number in range(workload.adapters)]
    sampling = SamplingParams(max_tokens=workload.num_tokens, ignore_eos=True)
    vocab = engine.model.vocab_size
    return [
        Request(
            f"{row}",
            tuple((7919 * row + 31 * place) % (vocab - 1) + 1 for place in range(workload.prompt_tokens)),
            adapters[row % len(adapters)] if adapters else None,
            sampling,
            row,
        )
        for row in range(workload.batch)
    ]
