"""`python -m lorabatch.benchmarks.engine.serving_costs`: what mode `exact` costs beside `unmerged`, in turns on the
same rows, and how much of a step goes into text (detokenising and looking for stop strings) and into what rows ask of
their tokens (grammars, penalties)."""

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
NUM_RULED_ROWS = 128
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["customer", "supplier", "other"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "notes"],
    "additionalProperties": False,
}
_NAMES = r"([A-Z][a-z]{2,12} ){8,40}[0-9]{4}"
RULES: dict[str, dict[str, Any]] = {
    "schema, greedy": {"json_schema": json.dumps(_PERSON)},
    "schema, drawn": {"json_schema": json.dumps(_PERSON), "temperature": 0.8},
    "regular expression, greedy": {"regex": _NAMES},
    "regular expression, drawn": {"regex": _NAMES, "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "bad words": {"bad_words": ("the", "very")},
}


def share_of_time(workload: EngineWorkload, of: Callable[[Engine], Any], *methods: str, **sampling: Any) -> float:
    """Share of serving time that methods of a part of the engine take; rows are of the base model."""
    engine = Engine(Path(workload.model), EngineConfig(mode="unmerged"))
    part, seconds = of(engine), 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal seconds
            began = time.perf_counter()
            result = call(*arguments, **options)
            seconds += time.perf_counter() - began
            return result

        return counted

    for method in methods:
        setattr(part, method, timed(getattr(part, method)))
    ends: dict[str, Any] = {"ignore_eos": True} if set(sampling) <= {"stop"} else {}
    requests = [
        Request(str(i), tuple(row.prompt_token_ids), None, SamplingParams(row.num_tokens, **ends, **sampling), i)
        for i, row in enumerate(workload.rows)
    ]
    began = time.perf_counter()
    list(engine.run(requests))
    return seconds / (time.perf_counter() - began)


def rule_shares(workload: EngineWorkload) -> dict[str, float]:
    """Share of serving time that rules take, where every row has one."""
    return {
        name: share_of_time(workload, lambda engine: engine.rules, "apply_", "refuse_", **options)
        for name, options in RULES.items()
    }


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
        shares = {
            name: share_of_time(workload, lambda engine: engine._completion, "finish", stop=stop)
            for name, stop in (("no stop strings", ()), ("two", STOPS))
        }
        many = make_workload(base_model_folder(), Path(scratch) / "many", NUM_RULED_ROWS, 1)
        of_rules = rule_shares(many)
    medians = {mode: statistics.median(taken) for mode, taken in seconds.items()}
    result = provenance(["torch"]) | {
        "benchmark": "what exactness and text cost",
        "rows": NUM_ROWS,
        "adapters": NUM_ADAPTERS,
        "seconds": seconds,
        "exact_per_unmerged": round(medians["exact"] / medians["unmerged"], 3),
        "rows_equal": sum(a == b for a, b in zip(tokens["exact"], tokens["unmerged"], strict=True)),
        "text_share_of_time": {name: round(share, 5) for name, share in shares.items()},
        "rows_with_rules": NUM_RULED_ROWS,
        "rules_share_of_time": {name: round(share, 5) for name, share in of_rules.items()},
    }
    print(json.dumps(result, indent=1))
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
