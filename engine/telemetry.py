"""`EngineTelemetry`: numbers that an engine reports about itself between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scheduler.messages import StepTotals
from .adapter_use import AdapterUse
from .request import ServedMode


@dataclass(frozen=True, slots=True)
class EngineTelemetry:
    """A snapshot between two steps. Counts of tokens, steps and seconds are totals since the engine started, of steps
    that have ended, so that a reader may take differences at any interval.
    """

    #: Sequences in the batch.
    num_running: int = 0
    #: Adapters in the pool.
    resident_adapter_ids: tuple[str, ...] = ()
    #: Mode in which the engine serves now.
    mode: ServedMode = "base"
    #: Pages of the pool that are not free.
    pages_used: int = 0
    #: Pages of the pool.
    pages_total: int = 0
    #: Prompt tokens computed so far, without those in `reused_prompt_tokens`.
    prompt_tokens: int = 0
    #: Tokens generated so far.
    generated_tokens: int = 0
    #: Steps so far.
    num_steps: int = 0
    #: Prompt tokens copied so far from rows whose prompts begin alike, or that prompts continue.
    reused_prompt_tokens: int = 0
    #: Sum of the shares to which all steps were full: of the rows that a step may hold or of its tokens, whichever is
    #: more. Divided by `num_steps`, the mean share.
    filled_steps: float = 0.0
    #: Seconds spent in steps, as the engine's process counts.
    busy_s: float = 0.0
    #: Tokens that running sequences have generated so far.
    running_tokens: int = 0
    #: Costs of adapters so far.
    adapters: AdapterUse = field(default_factory=AdapterUse)
    #: Pages among `pages_used` that hold adapters.
    adapter_pages: int = 0
    #: Pages among `pages_used` that hold beginnings of prompts for other rows.
    prefix_pages: int = 0
    #: Host memory for adapters that left the pool.
    host_tier_bytes: int = 0
    #: Host memory that adapters take which left the pool.
    host_tier_used_bytes: int = 0
    #: Sums over all steps of what they computed.
    steps: StepTotals = field(default_factory=StepTotals)
    #: Running sequences that do not decode yet.
    num_prefilling: int = 0
    #: Tokens of unfinished rows that are not computed yet: of prompts, and tokens that came with the rows.
    prefill_tokens_left: int = 0

    @property
    def computing_s(self) -> float:
        """`busy_s` without merges and waits for adapters."""
        return self.busy_s - self.adapters.switching_s - self.adapters.stall_s

    @property
    def prefix_hit_rate(self) -> float:
        """Share of all prompt tokens that no step had to compute."""
        return self.reused_prompt_tokens / max(self.prompt_tokens + self.reused_prompt_tokens, 1)
