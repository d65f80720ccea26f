"""The workload of the engine benchmark: one file that every system reads."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.peft.random import write_random_adapter

Lengths = Literal["uniform", "long-tailed"]
ALL_LENGTHS: tuple[Lengths, ...] = get_args(Lengths)
Prompts = Literal["short", "long"]
ALL_PROMPTS: tuple[Prompts, ...] = get_args(Prompts)
_PROMPT_TOKENS: Mapping[Prompts, tuple[int, int]] = {"short": (16, 160), "long": (900, 1100)}
# Fewest and most tokens of an answer where lengths are uniform.
_ANSWER_TOKENS: Mapping[Prompts, tuple[int, int]] = {"short": (16, 72), "long": (8, 24)}
RANKS = (8, 16, 32, 64)
# Mean and standard deviation of the logarithm of GeneratedTokens in AzureLLMInferenceTrace_conv.csv (19,366 requests,
# Azure public data set, 2023), and the share of these lengths that keeps a run of every system within minutes.
_LOG_MEAN, _LOG_DEVIATION, _SCALE = 5.019, 0.859, 0.25
#: The limit that every system is given where lengths are long-tailed.
LIMIT_TOKENS = 320


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One request: token ids in, exactly `num_tokens` greedy tokens out (stop tokens are ignored)."""

    prompt_token_ids: list[int]
    adapter: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineWorkload:
    """Rows, the base model's folder and the adapters' folders by name.

    `limit_tokens`: None where every system knows how long each answer will be. Otherwise the one limit that every
    system is given; rows end at their own lengths, as at a stop token.
    """

    model: str
    adapters: dict[str, str]
    rows: list[BenchRow]
    limit_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

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
        return cls(raw["model"], raw["adapters"], [BenchRow(**row) for row in raw["rows"]], raw["limit_tokens"])


def make_workload(
    model_folder: Path,
    folder: Path,
    num_rows: int,
    num_adapters: int,
    lengths: Lengths = "uniform",
    prompts: Prompts = "short",
    seed: int = 0,
) -> EngineWorkload:
    """Rows over adapters of ranks 8 to 64 on all linear layers, in random order of adapters. Prompts have 16 to 160
    tokens and answers 16 to 72, or 900 to 1,100 and 8 to 24; answers may instead have long-tailed lengths that no
    system knows. Adapters are written below `folder`.
    """
    model: ModelConfig = read_model_config(model_folder)
    rng = random.Random(seed)
    adapters = {
        f"adapter-{i}": str(write_random_adapter(folder / f"adapter-{i}", model, RANKS[i % len(RANKS)], seed + i))
        for i in range(num_adapters)
    }
    rows = [
        BenchRow(
            prompt_token_ids=[
                rng.randrange(100, model.vocab_size) for _ in range(rng.randint(*_PROMPT_TOKENS[prompts]))
            ],
            adapter=f"adapter-{i % num_adapters}",
            num_tokens=drawn_length(rng) if lengths == "long-tailed" else rng.randint(*_ANSWER_TOKENS[prompts]),
        )
        for i in range(num_rows)
    ]
    rng.shuffle(rows)
    return EngineWorkload(str(model_folder), adapters, rows, None if lengths == "uniform" else LIMIT_TOKENS)


def drawn_length(rng: random.Random) -> int:
    """The length of an answer in tokens, as answers in the Azure conversation trace have them, a quarter as long."""
    return min(max(round(_SCALE * rng.lognormvariate(_LOG_MEAN, _LOG_DEVIATION)), 1), LIMIT_TOKENS)
