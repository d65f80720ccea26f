"""What an engine reports about itself between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scheduler.messages import StepTotals
from .request import ServedMode


@dataclass(frozen=True, slots=True)
class EngineTelemetry:
    """A snapshot between two steps.

    `num_running` sequences are in the batch, of which `num_prefilling` have no token yet. `prefill_tokens_left`: prompt
    tokens of unfinished rows, and tokens that came with them, that are not computed yet. `running_tokens`: what running
    ones have generated so far. Token and step counts are totals since the engine started, of steps that have ended, so
    that a reader may take differences at any interval. `prompt_tokens` are computed, `reused_prompt_tokens` were copied
    from rows whose prompts begin alike. `num_step_rows` adds up the rows of all steps: per step, they are the occupancy
    of the batch. `busy_s`: spent in steps, as the process counts. `adapter_loads` count copies into the pool,
    `adapter_reads` those from storage; `adapter_stall_s` is how long steps waited for both. `num_switches` merges and
    restorations took `switching_s` of the steps. `steps`: what all of them have done.
    """

    num_running: int = 0
    resident_adapter_ids: tuple[str, ...] = ()
    mode: ServedMode = "base"
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    reused_prompt_tokens: int = 0
    num_step_rows: int = 0
    busy_s: float = 0.0
    running_tokens: int = 0
    adapter_loads: int = 0
    adapter_reads: int = 0
    adapter_stall_s: float = 0.0
    num_switches: int = 0
    switching_s: float = 0.0
    steps: StepTotals = field(default_factory=StepTotals)
    num_prefilling: int = 0
    prefill_tokens_left: int = 0

    @property
    def computing_s(self) -> float:
        """`busy_s` without merges and waits for adapters."""
        return self.busy_s - self.switching_s - self.adapter_stall_s

    @property
    def prefix_hit_rate(self) -> float:
        """Share of all prompt tokens that no step had to compute."""
        return self.reused_prompt_tokens / max(self.prompt_tokens + self.reused_prompt_tokens, 1)
