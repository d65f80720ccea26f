"""`python -m lorabatch.benchmarks.engine.rule_costs [RESULT] [--only NAME …]`: what rows ask of their tokens costs.

128 rows of the base model, whose prompts are random tokens, all have the same rule: a grammar, penalties, forbidden
words. Two numbers for each:

- `share_of_time`: of a run's seconds, those that the thread of the steps spends on rules: masks, checks, penalties, the
  choice of other tokens in the place of refused ones. Nothing of it runs beside the steps.
- `first_rows_s`: that it spends on the first two rows, which read the tokenizer and compile the grammar, once in an
  engine; not part of the others.
- `seconds_per_second_without`: the same steps with the same tokens are run again without any rule, in turns; of each
  step the shortest time of all repeats counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from lorabatch.benchmarks.engine.serving_costs import Stopwatch
from lorabatch.benchmarks.engine.workload import EngineWorkload, make_workload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner import runner, sampler
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.token_rules import TokenRules

NUM_ROWS = 128
_CONFIG = EngineConfig(mode="unmerged", max_batch_rows=NUM_ROWS)
Tokens = dict[str, tuple[int, ...]]
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


def share_of_rules(workload: EngineWorkload, options: Mapping[str, Any]) -> tuple[dict[str, float], Tokens]:
    """Seconds of the first rows, share of serving time that rules take, and the tokens of each row."""
    engine, watch = Engine(Path(workload.model), _CONFIG), Stopwatch()
    watch.time(engine.rules, "apply_", "is_complete")
    with patch.object(sampler, "_choose_again", sampler._choose_again):
        watch.time(sampler, "_choose_again")
        _warm(engine, options)
        first_s, watch.seconds = watch.seconds, 0.0
        began = time.perf_counter()
        results = list(engine.run(_requests(workload, options)))
        seconds = time.perf_counter() - began
    assert all(result.error is None for result in results)
    found = {"first_rows_s": round(first_s, 3), "share_of_time": round(watch.seconds / seconds, 5)}
    return found, {result.request_id: result.token_ids for result in results}


def step_seconds(workload: EngineWorkload, options: Mapping[str, Any]) -> list[float]:
    """Seconds of each step of a run."""
    engine = Engine(Path(workload.model), _CONFIG)
    _warm(engine, options)
    return _timed_steps(engine, _requests(workload, options))


def step_seconds_without(workload: EngineWorkload, tokens: Tokens, temperature: float) -> list[float]:
    """Seconds of each step of a run in which rows have no rule, choose freely, and get these tokens nevertheless."""

    def given(logits: Tensor, sequences: Items[Sequence], rules: TokenRules) -> sampler.SampledTokens:
        chosen = sampler.sample(logits, sequences, rules)
        return chosen._replace(ids=[tokens[s.request.request_id][len(s.token_ids)] for s in sequences])

    engine = Engine(Path(workload.model), _CONFIG)
    _warm(engine, {})
    requests = _requests(workload, {"temperature": temperature, "ignore_eos": True})
    limited = [replace(r, sampling=replace(r.sampling, max_tokens=len(tokens[r.request_id]))) for r in requests]
    with patch.object(runner, "sample", given):
        return _timed_steps(engine, limited)


def _warm(engine: Engine, options: Mapping[str, Any]) -> None:
    list(engine.run(Request(f"warm {i}", (100, 101), None, SamplingParams(4, **options), i) for i in range(2)))


def _timed_steps(engine: Engine, requests: list[Request]) -> list[float]:
    engine.add(requests)
    seconds = []
    while engine.num_unfinished:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _requests(workload: EngineWorkload, options: Mapping[str, Any]) -> list[Request]:
    return [
        Request(str(i), tuple(row.prompt_token_ids), None, SamplingParams(row.num_tokens, **options), i)
        for i, row in enumerate(workload.rows)
    ]


def costs_of(workload: EngineWorkload, options: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """Both numbers of one rule."""
    found, tokens = share_of_rules(workload, options)
    with_rules, without = [], []
    for _ in range(repeats):
        with_rules.append(step_seconds(workload, options))
        without.append(step_seconds_without(workload, tokens, options.get("temperature", 0.0)))
    if repeats:
        shortest, shortest_without = (np.array(runs).min(axis=0).sum() for runs in (with_rules, without))
        found["seconds_per_second_without"] = round(float(shortest / shortest_without), 4)
    return found


def main() -> None:
    """Run the benchmark, print its result, and save it if asked: rules that the file has already are kept."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.engine.rule_costs", description=__doc__)
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=list(RULES), choices=list(RULES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=2, help="of runs with and without rules")
    chosen = parser.parse_args()
    known = json.loads(chosen.result.read_text(encoding="utf-8")) if chosen.result and chosen.result.exists() else {}
    costs: dict[str, Any] = known.get("rules", {})
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(base_model_folder(), Path(scratch), NUM_ROWS, 1)
        for name in chosen.only:
            costs[name] = costs_of(workload, RULES[name], chosen.repeats)
    result = provenance(["torch", "llguidance"]) | {
        "benchmark": "what rules cost",
        "rows": NUM_ROWS,
        "rules": {name: costs[name] for name in RULES if name in costs},
    }
    print(json.dumps(result, indent=1))
    if chosen.result is not None:
        chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
