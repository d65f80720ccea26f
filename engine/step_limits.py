"""How many rows may decode together and how many tokens a step has at most, where nobody says. No torch: planners ask.

On a CPU 64 rows bring matrix products near their best and 512 tokens keep a step under a second. On a GPU the numbers
come from its memory:

- `step_tokens`: 16384, halved until what a step keeps at once (`device_budget.step_bytes`) is at most a sixteenth of
  what the weights leave. A longer step costs nothing in a batch job and spreads the host's work of launching a prompt
  step kernel by kernel (some 450 launches for 32 layers) over more tokens.
- `batch_rows`: as many as the pool holds with contexts of 1024 tokens, in steps of 64, from 64 to 512. Weights are read
  once per step whatever the rows; beyond 512 rows planning a step on the host would take longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .config import DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS, EngineConfig

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
