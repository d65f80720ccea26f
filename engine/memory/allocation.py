"""Sizes the page pool and the largest step from the machine's memory, and allocates the pool.

On a CPU matrix products are near their best with 64 rows, and 512 tokens keep a step under a second. On a GPU the
numbers come from its memory:

- `step_tokens`: 16384, halved until what a step keeps at once (`step_bytes`) is at most a sixteenth of what the weights
  leave. A longer step costs nothing in a batch job and spreads the host's work of launching a prompt step kernel by
  kernel (some 450 launches for 32 layers) over more tokens.
- `batch_rows`: as many as the pool holds with contexts of 1024 tokens, in steps of 64, from 64 to 512. Weights are read
  once per step whatever the rows; beyond 512 rows planning a step on the host would take longer than the step.
- the pool: what weights, merging and the largest step leave.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DEFAULT_BATCH_ROWS, DEFAULT_STEP_TOKENS, EngineConfig
from ..errors import PoolExhaustedError
from ..model_config.model import PACKED_SITES, ModelConfig
from .pool import PageLayout, PageRun

_GIB = 1 << 30
_DEFAULT_CPU_POOL_BYTES = 2 * _GIB
# What torch's allocator cannot use, and room for graphs and compiled kernels.
_SLACK_SHARE = 0.05
_FP32_BYTES = 4
_MOST_ROWS, _ROWS_STEP = 512, 64
_MOST_TOKENS, _FEWEST_TOKENS = 16384, 512
_CONTEXT_TOKENS = 1024
_STEP_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Rows that may decode together, and tokens of one step at most."""

    batch_rows: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the pool and their layout, and the limits of a step."""

    layout: PageLayout
    num_pages: int
    limits: StepLimits


def plan_pool(layout: PageLayout, itemsize: int, limits: StepLimits, pool_bytes: int) -> MemoryPlan:
    """A pool of at most `pool_bytes`, its numbers of `itemsize` bytes. Raises `PoolExhaustedError` without one page."""
    page_bytes = layout.page_elements * itemsize
    num_pages = pool_bytes // page_bytes
    if num_pages < 1:
        raise PoolExhaustedError(
            f"pool_bytes={pool_bytes}: one page of this model takes {page_bytes} bytes; raise pool_bytes."
        )
    return MemoryPlan(layout, num_pages, limits)


def cpu_limits(config: EngineConfig) -> StepLimits:
    """Limits of a step on a CPU: what was asked for, or the defaults."""
    return StepLimits(config.max_batch_rows or DEFAULT_BATCH_ROWS, config.max_step_tokens or DEFAULT_STEP_TOKENS)


def default_cpu_pool_bytes() -> int:
    """Bytes of a CPU engine's pool where none are asked for."""
    return min(_DEFAULT_CPU_POOL_BYTES, _total_bytes() // 8)


def gpu_plan(free_bytes: int, config: EngineConfig, model: ModelConfig, itemsize: int) -> tuple[StepLimits, int]:
    """Limits of a step and bytes of the pool on a GPU with `free_bytes` left by the weights."""

    def pool_bytes(limits: StepLimits) -> int:
        return config.pool_bytes or gpu_pool_bytes(free_bytes, limits, model, itemsize)

    def is_small(tokens: int) -> bool:
        return step_bytes(StepLimits(rows or _ROWS_STEP, tokens), model, itemsize) <= free_bytes * _STEP_SHARE

    rows, tokens = config.max_batch_rows, config.max_step_tokens
    if tokens is None:
        tokens = _MOST_TOKENS
        while tokens > _FEWEST_TOKENS and not is_small(tokens):
            tokens //= 2
    if rows is None:
        token_bytes = 2 * model.num_layers * model.kv_size * itemsize
        fitting = pool_bytes(StepLimits(_MOST_ROWS, tokens)) // (_CONTEXT_TOKENS * token_bytes)
        rows = min(max(fitting // _ROWS_STEP, 1) * _ROWS_STEP, _MOST_ROWS)
    limits = StepLimits(rows, tokens)
    return limits, pool_bytes(limits)


def gpu_pool_bytes(free_bytes: int, limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Bytes of the pool when `free_bytes` are left after the weights; 0 when nothing is left for it."""
    left = free_bytes * (1 - _SLACK_SHARE) - live_weight_bytes(model, itemsize) - step_bytes(limits, model, itemsize)
    return max(int(left), 0)


def live_weight_bytes(model: ModelConfig, itemsize: int) -> int:
    """Copies of the decoder layers' linear weights that adapters are merged into, kept once an adapter was merged."""
    sizes = (out * size for site in PACKED_SITES for out, size in model.members_of_site(site).values())
    return model.num_layers * sum(sizes) * itemsize


def step_bytes(limits: StepLimits, model: ModelConfig, itemsize: int) -> int:
    """Numbers of the largest step that live at once: a layer's, and the logits of every running row.

    Per token: residual stream, normed input and the product that joins it (3 hidden), and the wider of attention
    (qkv, queries' answers) and the MLP (its packed product and the activation). Per row: logits, their copy for
    log-probabilities, and one in fp32 for the sum of their exponentials.
    """
    attention = 2 * model.q_size + 2 * model.kv_size
    mlp = (3 if model.has_gate else 2) * model.intermediate_size
    per_token = (3 * model.hidden_size + max(attention, mlp)) * itemsize
    per_row = model.vocab_size * (2 * itemsize + _FP32_BYTES)
    return limits.step_tokens * per_token + limits.batch_rows * per_row


def host_tier_bytes(config: EngineConfig) -> int:
    """Host memory for adapters that had to leave the pool."""
    if config.host_tier_bytes is not None:
        return config.host_tier_bytes
    return min(_GIB, _total_bytes() // 16)


def zeroed_memory(num_elements: int, dtype: torch.dtype) -> Tensor:
    """`[num_elements]` on the CPU, all zero, taken from the system page by page on first use: a pool of gigabytes is
    there at once and counts only for what it holds (small pages, docs/adr/0013).
    """
    # torch.zeros writes every byte; the system hands out memory that is zero already, and aligned to its pages.
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)


def eraser_for(memory: Tensor, layout: PageLayout) -> Callable[[PageRun], None]:
    """A function that zeroes a run of `memory` (flat)."""

    def erase(run: PageRun) -> None:
        memory[run.start * layout.page_elements : run.end * layout.page_elements].zero_()

    return erase


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
