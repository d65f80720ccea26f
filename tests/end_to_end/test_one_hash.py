"""Mode `exact` on the real engine: any number of workers, any size of shards, migration or not, one output.

`python -m pytest -s tests/end_to_end/test_one_hash.py` prints a line for each job.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_under_test import own_cluster
from distributed import Client

from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.run import run
from lorabatch.tests.end_to_end.chaos.sorted_output import digest, sorted_output

NUM_ROWS = 48
SHARD_ROWS = (5, 12, 24)
# The engine that starts first has steps 30 times longer: the others run out of rows while it has its first batch.
SLOW = {"step_s": 0.005, "slow_factor": 30}


@pytest.fixture
def options(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A job whose rows ask for the base model and every adapter, some greedily and some by chance."""
    names = [None, *sorted(tiny_adapters)]
    rows = [
        {"id": i, "adapter": names[i % 4], "prompt": f"once upon a midnight {i}", "temperature": i % 3 / 2}
        for i in range(NUM_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    shutil.copytree(tiny_llama, tmp_path / "model")
    return {
        "model": str(tmp_path / "model"),
        "adapters": str(next(iter(tiny_adapters.values())).parent),
        "input": str(tmp_path / "input.parquet"),
        "mode": "exact",
        "max_tokens": 150,
        "batch_rows": 8,
        "engine_threads": 1,
        "logprobs": True,
        "ignore_eos": True,
        "row_settings": "all",
    }


@pytest.fixture
def rules(options: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same job, whose rows ask for grammars, penalties, scores and several completions."""
    asked: list[dict[str, Any]] = [
        {"regex": "([a-z]{1,6} ){4,9}[a-z]+", "ignore_eos": False, "temperature": 1.0, "n": 2},
        {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "temperature": 0.7},
        {"choice": ["a", "an answer", "another", "the"], "ignore_eos": False, "temperature": 0.9},
        {"choice": ["yes", "yesterday", "no"], "ignore_eos": False, "n": 2, "prompt_logprobs": True},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.8, "min_p": 0.01, "n": 3},
        {"bad_words": ["the", "a"], "presence_penalty": 1.0, "top_logprobs": 3, "prompt_top_logprobs": 2},
    ]
    rows = pq.read_table(tmp_path / "input.parquet").to_pylist()
    rows = [row | asked[row["id"] // 4 % len(asked)] for row in rows]
    names = {name for row in rows for name in row}
    pq.write_table(pa.Table.from_pylist([{n: row.get(n) for n in names} for row in rows]), tmp_path / "input.parquet")
    return options


SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 5}},
    "required": ["words"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Variant:
    """What may differ between two jobs of one output."""

    num_workers: int
    rows_per_shard: int
    migration: bool


# Each number of workers with each size of shards; migration with each of both.
NINE = [Variant(n, SHARD_ROWS[j], (i + j) % 2 == 1) for i, n in enumerate((1, 2, 4)) for j in range(len(SHARD_ROWS))]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_workers_shards_and_migration_change_no_byte(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_one_hash(NINE, options, tmp_path, capsys)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_they_change_no_byte_of_rows_with_rules_and_samples_and_neither_does_a_kill(
    rules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [Variant(n, rows, n > 1) for n in (1, 2, 4) for rows in SHARD_ROWS]
    check_one_hash(variants, rules, tmp_path, capsys, dies_at_step=60)
    assert (tmp_path / "model" / "has-died").exists()
    answers = sorted_output(tmp_path / "output-0")
    for column in ("choice_logprobs", "prompt_token_logprobs", "prompt_token_top_logprobs", "token_top_logprobs"):
        assert answers[column].null_count < len(answers), f"no row has {column}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_they_change_no_byte_of_rows_with_lists_of_completions(
    rules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [Variant(1, 24, False), Variant(2, 5, True), Variant(2, 12, True)]
    check_one_hash(variants, rules | {"samples": "lists"}, tmp_path, capsys, dies_at_step=60)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_they_change_no_byte_of_a_teachers_columns_and_neither_does_a_kill(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pq.read_table(tmp_path / "input.parquet").to_pylist()
    texts = [None, [" said the fox" * 20], [" one" * 30, " two"]]
    rows = [row | {"continuation": texts[row["id"] // 4 % 3]} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    variants = [Variant(1, 24, False), Variant(2, 5, True), Variant(2, 12, True)]
    check_one_hash(variants, options | {"teacher_top_k": 16, "step_tokens": 64}, tmp_path, capsys, dies_at_step=60)
    answers = sorted_output(tmp_path / "output-1")
    assert answers["teacher_logprobs"].null_count == 0
    lengths = [len(places) for places in answers["teacher_token_ids"].to_pylist()]
    assert lengths == answers["completion_tokens"].to_pylist()


# Tiny models, each with layers of a kind that Llama's are not of, and the linear layers of its adapters.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "the gated delta rule": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "shared keys and inputs of layers": (
        "gemma4_text",
        {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16,
            "global_head_dim": 32, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320, "sliding_window": 16,
        },
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_they_change_no_byte_of_models_with_layers_of_other_kinds_and_neither_does_a_kill(
    kind: str,
    rules: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_model: Callable[..., Path],
    make_adapter: Callable[..., Path],
) -> None:
    family, settings = KINDS[kind]
    shutil.rmtree(tmp_path / "model")
    model = make_model(tmp_path / "model", family, **settings)
    for i, name in enumerate(("rank1", "rank20", "rank64", "rank8")):
        make_adapter(tmp_path / "adapters" / name, model, seed=i, r=int(name[4:]))
    variants = [
        Variant(1, 24, False),
        Variant(1, 5, False),
        Variant(2, 5, True),
        Variant(2, 12, True),
        Variant(4, 5, True),
    ]
    options = rules | {"adapters": str(tmp_path / "adapters")}
    check_one_hash(variants, options, tmp_path, capsys, dies_at_step=60)
    assert (tmp_path / "model" / "has-died").exists()


def check_one_hash(
    variants: list[Variant],
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dies_at_step: int | None = None,
) -> None:
    """All jobs have the same output; in the first with several workers one engine dies."""
    hashes: dict[Variant, str] = {}
    num_moved: Counter[int] = Counter()
    for num_workers, group in groupby(variants, key=attrgetter("num_workers")):
        (tmp_path / "model" / "faults.json").write_text(
            json.dumps(SLOW | {"dies_at_step": dies_at_step} if num_workers > 1 else {})
        )
        with own_cluster(num_workers) as client:
            for variant in group:
                (tmp_path / "model" / "slow").unlink(missing_ok=True)
                output = tmp_path / f"output-{len(hashes)}"
                moved = run_job(options, variant, output, client)
                num_moved[num_workers] += moved
                hashes[variant] = digest(output)
                with capsys.disabled():
                    print(f"\n{variant}: {hashes[variant][:16]}, {moved} rows moved", end="", flush=True)
    assert len(set(hashes.values())) == 1, hashes
    assert all(num_moved[n] for n in num_moved if n > 1), num_moved


def run_job(options: dict[str, Any], variant: Variant, output: Path, client: Client) -> int:
    """Run the job; how many of its rows moved between workers."""
    given = {"output": str(output), "rows_per_shard": variant.rows_per_shard, "migration": variant.migration}
    result = run(JobSpec(**options | given), client=client, engine_factory="faulty_engine:FaultyEngine")
    assert result.num_rows >= NUM_ROWS
    moves = [event for event in JobStore(str(output)).read_events() if event["kind"] == "MigrateRows"]
    assert variant.migration or not moves
    return sum(move["num_rows"] for move in moves)
