"""Write `demo/prompts.parquet`: held-out prompts for every adapter and for the bare base model.

`python -m lorabatch.demo.make_prompts` gives the same rows every time. Besides what a job needs (`id`, `adapter`,
`messages`, `max_tokens`) each row carries columns that only pass through: `tenant`, `expected`, `meta`, `created_at`.
"""

from __future__ import annotations

import argparse
import datetime
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .tasks import TASKS

PROMPTS = Path(__file__).parent / "prompts.parquet"
# Seed of the prompts, other than those of evaluation and training.
PROMPTS_SEED = 3
PROMPTS_PER_ADAPTER = {"sentiment": 64, "contacts": 48, "pirate": 56, "sql": 56}
BASE_MAX_TOKENS = 24
TENANTS = ("harbor", "meadow", "lantern", "orchard", "quarry")
FIRST_CREATED_AT = datetime.datetime(2026, 1, 5, 8, 0, tzinfo=datetime.UTC)
BASE_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What do bees make?",
    "How many days are in a week?",
    "What is the opposite of cold?",
    "Which planet do we live on?",
    "What is water made of?",
    "Name a famous painter.",
    "What is the largest ocean?",
    "Say hello in Spanish.",
    "What does a clock show?",
    "Who wrote Romeo and Juliet?",
    "What is the season after winter?",
    "Name an animal that can fly.",
    "What is frozen water called?",
    "In one sentence, what is a library?",
    "What is the first month of the year?",
    "Name a fruit that is yellow.",
    "What language is spoken in Brazil?",
    "How many legs has a spider?",
    "In one sentence, why do we sleep?",
    "What do you call a baby cat?",
    "Name a river in Africa.",
    "What is the capital of Japan?",
    "What do plants need to grow?",
    "Which metal is liquid at room temperature?",
    "Name a musical instrument with strings.",
    "What is the colour of the sky?",
    "How many minutes are in an hour?",
    "In one sentence, what is gravity?",
    "What is the tallest animal?",
    "Name a country in Europe.",
)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("adapter", pa.string()),
        pa.field("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        pa.field("max_tokens", pa.int32()),
        pa.field("tenant", pa.string()),
        pa.field("expected", pa.string()),
        pa.field("meta", pa.struct([("source", pa.string()), ("length", pa.int32())])),
        pa.field("created_at", pa.timestamp("us", tz="UTC")),
    ]
)


def prompt_rows() -> list[dict[str, Any]]:
    """All rows in file order: adapters mixed, as a log of requests would be."""
    rng = random.Random(PROMPTS_SEED)
    rows = [*_adapter_rows(), *_base_rows()]
    rng.shuffle(rows)
    for number, row in enumerate(rows):
        row["tenant"] = rng.choice(TENANTS)
        row["created_at"] = FIRST_CREATED_AT + datetime.timedelta(seconds=37 * number)
    return rows


def _adapter_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-{number:03d}",
            "adapter": name,
            "messages": TASKS[name].messages(example.prompt),
            "max_tokens": TASKS[name].max_tokens,
            "expected": example.answer,
            "meta": {"source": "made", "length": len(example.prompt)},
        }
        for name, count in PROMPTS_PER_ADAPTER.items()
        for number, example in enumerate(TASKS[name].examples("held_out", count, PROMPTS_SEED))
    ]


def _base_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": f"base-{number:03d}",
            "adapter": None,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": BASE_MAX_TOKENS,
            "expected": None,
            "meta": {"source": "written", "length": len(question)},
        }
        for number, question in enumerate(BASE_QUESTIONS)
    ]


def write_prompts(path: Path) -> int:
    """Write the file; returns the number of rows. Two row groups, so that even the demo's index runs in parallel."""
    rows = prompt_rows()
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, path, compression="zstd", row_group_size=(len(rows) + 1) // 2)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PROMPTS)
    output = parser.parse_args().output
    print(f"{write_prompts(output)} rows in {output}")


if __name__ == "__main__":
    main()
