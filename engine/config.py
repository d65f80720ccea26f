"""How an engine is set up (`EngineConfig`), and the base model of a folder (`ModelConfig`).

No torch here: the audit, the planner and the command line read these too.

How many rows may decode together and how many tokens a step has at most, where nobody says. No torch: planners ask.

On a CPU 64 rows bring matrix products near their best and 512 tokens keep a step under a second. On a GPU the numbers
come from its memory:

- `step_tokens`: 16384, halved until what a step keeps at once (`device_budget.step_bytes`) is at most a sixteenth of
  what the weights leave. A longer step costs nothing in a batch job and spreads the host's work of launching a prompt
  step kernel by kernel (some 450 launches for 32 layers) over more tokens.
- `batch_rows`: as many as the pool holds with contexts of 1024 tokens, in steps of 64, from 64 to 512. Weights are read
  once per step whatever the rows; beyond 512 rows planning a step on the host would take longer than the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import ModelFilesError
from .model_config import parse_model_config
from .model_config.model import ModelConfig

if TYPE_CHECKING:
    from ..scheduler.cost import CostModel

__all__ = [
    "DEFAULT_BATCH_ROWS",
    "DEFAULT_STEP_TOKENS",
    "AutoPolicy",
    "EngineConfig",
    "Mode",
    "ModelConfig",
    "read_json",
    "read_model_config",
]
Mode = Literal["auto", "unmerged", "merged", "exact"]
AutoPolicy = Literal["cost", "dlora", "waves"]
DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS = 64, 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: limits of a step and of memory. What depends on the machine is computed by the engine itself.

    `max_batch_rows`: sequences that may decode together. `max_step_tokens`: tokens of one step, prefill chunks
    included (None for either: see `step_limits`). `pool_bytes`: size of the page pool (None: a share of free memory).
    `host_tier_bytes`: host memory for adapters that had to leave the pool (None: a sixteenth of all, at most 1 GiB).
    `num_threads`: CPU threads (None: leave torch's choice). `mode`: see product documentation; `exact` fixes arithmetic
    per row. `auto_policy`: what mode `auto` decides by: the cost of each step, mixture included; dLoRA's dynamic
    batching; or merged waves for adapters with many rows. `uses_prefix_cache`: rows whose prompts begin alike compute
    the beginning once (in `exact` where compiled CPU kernels serve).
    `kernels`: GPUs run the Triton kernels; `triton` runs them on a CPU too, in Triton's interpreter, to test them.
    `launches_ahead`: a GPU's next step may be launched before the last one is read. `cost`: what steps and merges take,
    as mode `auto` decides by (None: the preset of a machine of that kind).
    """

    max_batch_rows: int | None = None
    max_step_tokens: int | None = None
    page_tokens: int = 16
    pool_bytes: int | None = None
    host_tier_bytes: int | None = None
    num_threads: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    mode: Mode = "auto"
    auto_policy: AutoPolicy = "cost"
    uses_prefix_cache: bool = True
    load_format: Literal["auto", "dummy"] = "auto"
    kernels: Literal["auto", "triton"] = "auto"
    launches_ahead: bool = True
    cost: CostModel | None = None

    @property
    def batch_rows(self) -> int:
        """Rows that may decode together, as asked for or by default, before the machine is known."""
        return self.max_batch_rows or DEFAULT_BATCH_ROWS

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, likewise."""
        return self.max_step_tokens or DEFAULT_STEP_TOKENS


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model folder. Raises `ModelFilesError` when missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{path}: missing. A model folder needs this file; check --model.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path}: not valid JSON ({error}). Fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for stop tokens) of a Hugging Face model folder.

    Raises `UnsupportedModelError` for a family or setting that would not be computed exactly, and
    `ModelFilesError` for a missing or malformed file.
    """
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation)


_MOST_ROWS, _ROWS_STEP = 512, 64
_MOST_TOKENS, _FEWEST_TOKENS = 16384, 512
_CONTEXT_TOKENS = 1024
_STEP_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Rows that may decode together, and tokens of one step at most."""

    batch_rows: int
    step_tokens: int


def cpu_limits(config: EngineConfig) -> StepLimits:
    """What was asked for, or what suits a CPU."""
    return StepLimits(config.max_batch_rows or DEFAULT_BATCH_ROWS, config.max_step_tokens or DEFAULT_STEP_TOKENS)


def gpu_limits(
    config: EngineConfig,
    free_bytes: int,
    step_bytes: Callable[[StepLimits], int],
    pool_bytes: Callable[[StepLimits], int],
    token_bytes: int,
) -> StepLimits:
    """What was asked for, or what suits a GPU with `free_bytes` left by the weights. `token_bytes`: keys and values of
    a token; the functions say what a step and the pool take under given limits."""
    rows, tokens = config.max_batch_rows, config.max_step_tokens
    if tokens is None:
        tokens = _MOST_TOKENS
        while tokens > _FEWEST_TOKENS and step_bytes(StepLimits(rows or _ROWS_STEP, tokens)) > free_bytes * _STEP_SHARE:
            tokens //= 2
    if rows is None:
        fitting = pool_bytes(StepLimits(_MOST_ROWS, tokens)) // (_CONTEXT_TOKENS * token_bytes)
        rows = min(max(fitting // _ROWS_STEP, 1) * _ROWS_STEP, _MOST_ROWS)
    return StepLimits(rows, tokens)
