"""`python -m lorabatch.benchmarks.engine.serving_costs`: what mode `exact` costs beside `unmerged`, in turns on the
same rows, and how much of a step goes into text (detokenising and looking for stop strings)."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorabatch.benchmarks.engine.systems import run_ours
from lorabatch.benchmarks.engine.workload import EngineWorkload, make_workload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams

NUM_ROWS, NUM_ADAPTERS, REPEATS = 32, 8, 3
STOPS = ("###", "\n\nQuestion:")


class Stopwatch:
    """Adds up the seconds of calls. `seconds`: so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, owner: Any, *names: str) -> None:
        """Count the seconds of these functions of an object or module from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds += time.perf_counter() - began
            return result

        return counted


def share_of_text(workload: EngineWorkload, stop: tuple[str, ...]) -> float:
    """Share of serving time that text takes; rows are of the base model."""
    engine, watch = Engine(Path(workload.model), EngineConfig(mode="unmerged")), Stopwatch()
    watch.time(engine._completion, "finish")
    requests = [
        Request(
            str(i), tuple(row.prompt_token_ids), None, SamplingParams(row.num_tokens, ignore_eos=True, stop=stop), i
        )
        for i, row in enumerate(workload.rows)
    ]
    began = time.perf_counter()
    list(engine.run(requests))
    return watch.seconds / (time.perf_counter() - began)


def main(result_path: Path | None = None) -> None:
    """Run the benchmark, print its result, and save it if asked."""
    from lorabatch.demo.base_model import base_model_folder

    seconds: dict[str, list[float]] = {"unmerged": [], "exact": []}
    tokens: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(base_model_folder(), Path(scratch), NUM_ROWS, NUM_ADAPTERS)
        for _ in range(REPEATS):
            for mode in ("unmerged", "exact"):
                taken, tokens[mode], _ = run_ours(workload, mode, lambda row: row.adapter)
                seconds[mode].append(round(taken, 2))
        shares = {name: share_of_text(workload, stop) for name, stop in (("no stop strings", ()), ("two", STOPS))}
    medians = {mode: statistics.median(taken) for mode, taken in seconds.items()}
    result = provenance(["torch"]) | {
        "benchmark": "what exactness and text cost",
        "rows": NUM_ROWS,
        "adapters": NUM_ADAPTERS,
        "seconds": seconds,
        "exact_per_unmerged": round(medians["exact"] / medians["unmerged"], 3),
        "rows_equal": sum(a == b for a, b in zip(tokens["exact"], tokens["unmerged"], strict=True)),
        "text_share_of_time": {name: round(share, 5) for name, share in shares.items()},
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
