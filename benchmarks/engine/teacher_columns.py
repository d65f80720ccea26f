"""Seconds and bytes of a teacher's likeliest tokens: `python -m lorabatch.benchmarks.engine.teacher_columns
[--rows 24] [--tokens 480] [--rounds 3] [--threads 1] [--save FILE]`.

Given texts of random tokens are computed by one engine for the base model and the demo's adapters, in turns: without
log-probabilities, with `teacher_top_k`, with `prompt_top_logprobs`, and token by token as scores with `top_logprobs`
are. Seconds are those of the processor: on a machine with other work they say more than those of a clock. Bytes are
those of one Parquet column with all places of all rows, as parts are written.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.train_adapters import ADAPTERS
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import MOST_TOP_LOGPROBS, Request, Result, SamplingParams
from lorabatch.jobs.input.columns import ASKED_FIELDS
from lorabatch.jobs.input.teacher import LOGPROBS, TOKENS, teacher_arrays

PROMPT_TOKENS = 32
WAYS = ("plain", "teacher 64", "teacher 20", "prompt top 20", "token by token top 20")


def requests(way: str, rows: list[tuple[str | None, tuple[int, ...]]]) -> list[Request]:
    """The rows as one way asks for them. `rows`: adapter, and tokens of prompt and text."""
    found = []
    for number, (adapter_id, tokens) in enumerate(rows):
        prompt, text = tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]
        if way.startswith("teacher"):
            sampling = SamplingParams(teacher_top_k=int(way.split()[-1])).scoring(text)
        elif way.startswith("token"):
            sampling = SamplingParams(top_logprobs=MOST_TOP_LOGPROBS).scoring(text)
        else:
            num_top = MOST_TOP_LOGPROBS if way.startswith("prompt") else 0
            prompt, sampling = tokens, SamplingParams(max_tokens=1, prompt_top_logprobs=num_top)
        found.append(Request(f"{number}", prompt, adapter_id, sampling))
    return found


def seconds_of(engine: Engine, rows: list[Request]) -> tuple[float, dict[str, Result]]:
    """Seconds of the processor from the first row to the last result, and the results."""
    began = time.process_time()
    results = {result.request_id: result for result in engine.run(rows)}
    return time.process_time() - began, results


def parquet_bytes(arrays: dict[str, pa.Array]) -> int:
    """Bytes of a Parquet file with these columns."""
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays), sink, compression="zstd")
    return len(sink.getvalue())


def bytes_of(results: dict[str, dict[str, Result]]) -> dict[str, int]:
    """Bytes of each kind of column per token, by its name."""
    found = {}
    for way, count in (("teacher 64", 64), ("teacher 20", 20)):
        arrays = teacher_arrays([result.teacher for result in results[way].values()], count)
        found[way] = parquet_bytes({name: arrays[name] for name in (TOKENS, LOGPROBS)})
    field = ASKED_FIELDS["top_logprobs"]
    structs = [
        [[{"token_id": token, "logprob": logprob} for token, logprob in top] for top in result.top_logprobs or ()]
        for result in results["token by token top 20"].values()
    ]
    found["structs without texts 20"] = parquet_bytes({field.name: pa.array(structs, field.type)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    engine = Engine(
        base_model_folder(), EngineConfig(mode="unmerged", uses_prefix_cache=False, num_threads=arguments.threads)
    )
    ids: list[str | None] = [None]
    for folder in sorted(ADAPTERS.iterdir()):
        content = audit_adapter(folder, engine.model, folder.name).content_sha256
        assert content is not None, f"{folder.name} is refused"
        engine.register_adapter(content, folder, folder.name)
        ids.append(content)
    rng = random.Random(1)
    rows = [
        (ids[i % len(ids)], tuple(rng.randrange(3, 49_000) for _ in range(PROMPT_TOKENS + arguments.tokens)))
        for i in range(arguments.rows)
    ]
    seconds_of(engine, requests("teacher 64", rows[: len(ids)]))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    results: dict[str, dict[str, Result]] = {}
    for number in range(arguments.rounds):
        for way in WAYS[:: 1 if number % 2 else -1]:
            took, results[way] = seconds_of(engine, requests(way, rows))
            seconds[way].append(took)
            print(f"{way}: {took:.2f} s", flush=True)
    num_tokens = arguments.rows * arguments.tokens
    best = {way: min(of_way) for way, of_way in seconds.items()}
    found: dict[str, Any] = {
        "seconds": seconds,
        "over_plain": {way: of_way / best["plain"] for way, of_way in best.items()},
        "bytes_per_token": {way: size / num_tokens for way, size in bytes_of(results).items()},
    }
    print(json.dumps(found, indent=1))
    if arguments.save is not None:
        facts = {"commit": commit(), "cpu": cpu_name(), "rows": arguments.rows, "tokens": arguments.tokens}
        arguments.save.write_text(json.dumps(facts | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
