"""What an engine says about itself about once a second. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .request import ServedMode


@dataclass(frozen=True, slots=True)
class EngineTelemetry:
    """A snapshot between two steps.

    `num_running` sequences are in the batch, `num_waiting` are admitted but have no pages yet. `running_tokens`: what
    the sequences in the batch have generated so far. Token and step
    counts are totals since the engine started, so that a reader may take differences at any interval. `prompt_tokens`
    are computed, `reused_prompt_tokens` were copied from rows whose prompts begin alike. `num_step_rows` adds up the
    rows of all steps: per step, they are the occupancy of the batch. `busy_s`: spent in steps, as the process counts.
    `adapter_loads` count copies
    into the pool, `adapter_reads` those from storage; `adapter_stall_s` is how long steps waited for both.
    """

    num_running: int
    num_waiting: int
    resident_adapter_ids: tuple[str, ...]
    mode: ServedMode
    pages_used: int
    pages_total: int
    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    reused_prompt_tokens: int = 0
    num_step_rows: int = 0
    busy_s: float = 0.0
    running_tokens: int = 0
    adapter_loads: int = 0
    adapter_reads: int = 0
    adapter_stall_s: float = 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of all prompt tokens that nobody had to compute."""
        return self.reused_prompt_tokens / max(self.prompt_tokens + self.reused_prompt_tokens, 1)
