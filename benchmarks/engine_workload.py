"""The workload of the engine benchmark: one file that every system reads."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from ..engine.config import ModelConfig, read_model_config
from ..engine.random_adapter import write_random_adapter

RANKS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One request: token ids in, exactly `max_tokens` greedy tokens out (stop tokens are ignored)."""

    prompt_token_ids: list[int]
    adapter: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class EngineWorkload:
    """Rows, the base model's folder and the adapters' folders by name."""

    model: str
    adapters: dict[str, str]
    rows: list[BenchRow]

    @property
    def output_tokens(self) -> int:
        return sum(row.max_tokens for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt_token_ids) for row in self.rows)

    def write(self, path: Path) -> None:
        """Save as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> EngineWorkload:
        """Load what `write` saved."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["model"], raw["adapters"], [BenchRow(**row) for row in raw["rows"]])


def make_workload(model_folder: Path, folder: Path, num_rows: int, num_adapters: int, seed: int = 0) -> EngineWorkload:
    """Rows over adapters of ranks 8 to 64 on all linear layers, with prompts of 16 to 160 tokens and answers of 16 to
    72, in random order of adapters. Adapters are written below `folder`."""
    model: ModelConfig = read_model_config(model_folder)
    rng = random.Random(seed)
    adapters = {
        f"adapter-{i}": str(write_random_adapter(folder / f"adapter-{i}", model, RANKS[i % len(RANKS)], seed + i))
        for i in range(num_adapters)
    }
    rows = [
        BenchRow(
            prompt_token_ids=[rng.randrange(100, model.vocab_size) for _ in range(rng.randint(16, 160))],
            adapter=f"adapter-{i % num_adapters}",
            max_tokens=rng.randint(16, 72),
        )
        for i in range(num_rows)
    ]
    rng.shuffle(rows)
    return EngineWorkload(str(model_folder), adapters, rows)
