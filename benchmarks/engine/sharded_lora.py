"""`python -m lorabatch.benchmarks.engine.sharded_lora [RESULT.json]`: what sharded LoRA would save a group of two.

Members of a tensor-parallel group hold A of `qkv` and `gate_up` and B of `o` and `down` whole (docs/adr/0091). S-LoRA
(section 5) shards these too, with two more meetings at each pair of sites. The gain without the meetings is measured by
adapters of a lower rank, whose members have as much to compute as sharded ones would; the meetings are measured by
themselves. Both groups take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorabatch.benchmarks.engine.tensor_parallel import NUM_ROWS, Shape, System, meetings
from lorabatch.benchmarks.engine.workload import make_workload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft.random import write_random_adapter

_RANK, _MEMBERS, _REPEATS = 64, 2, 5


def sharded_share(model: ModelConfig, num_members: int) -> float:
    """Numbers of an adapter that a member has where all are sharded, over those that it has today."""
    hidden, inner, members = model.hidden_size, model.intermediate_size, num_members
    whole = 3 * hidden + hidden + 2 * hidden + hidden  # A of q, k, v, B of o, A of gate and up, B of down
    heads = model.attention
    split = heads.q_size + 2 * heads.kv_size + heads.q_size + 3 * inner
    return (whole + split) / members / (whole + split / members)


def measure(num_adapters: int) -> dict[str, Any]:
    """Seconds of a group with adapters of rank 64, and of the rank that has a sharded adapter's numbers."""
    model_folder = base_model_folder()
    model = read_model_config(model_folder)
    rank = round(_RANK * sharded_share(model, _MEMBERS))
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch, ExitStack() as stack:
        workload = make_workload(model_folder, Path(scratch) / "rows", NUM_ROWS, num_adapters)
        systems = {}
        for name, its_rank in (("whole", _RANK), ("as sharded", rank)):
            adapters = {
                each: str(write_random_adapter(Path(scratch) / name / each, model, its_rank, seed))
                for seed, each in enumerate(workload.adapters)
            }
            system = System(replace(workload, adapters=adapters), Shape(1, _MEMBERS, _MEMBERS))
            systems[name] = stack.enter_context(closing(system))
            system.serve([replace(row, num_tokens=2) for row in workload.rows])
        plain = [replace(row, adapter="") for row in workload.rows]
        runs: dict[str, list[float]] = {"base": [], **{name: [] for name in systems}}
        for _ in range(_REPEATS):
            runs["base"].append(systems["whole"].serve(plain).seconds)
            for name, system in systems.items():
                runs[name].append(system.serve(workload.rows).seconds)
            print({name: round(seconds[-1], 2) for name, seconds in runs.items()}, file=sys.stderr, flush=True)
    gains = [1 - few / many for many, few in zip(runs["whole"], runs["as sharded"], strict=True)]
    return {
        "adapters": num_adapters,
        "rank": _RANK,
        "rank_as_sharded": rank,
        "seconds": {name: round(statistics.median(seconds), 3) for name, seconds in runs.items()},
        "most_gain": round(statistics.median(gains), 4),
        "gains": [round(gain, 4) for gain in gains],
    }


def main(result_path: Path | None = None) -> None:
    """Measure, print, and save if asked."""
    found = [measure(num_adapters) for num_adapters in (8, 64)]
    result = provenance(("torch",)) | {"sharding": found, "meetings_us": meetings(_MEMBERS)}
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
