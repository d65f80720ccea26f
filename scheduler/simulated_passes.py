"""What the passes of a simulated replica's step cost: real rows, seconds from the cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel, StepLoad, lora_load, prompt_pairs


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """`number` forward passes of one batch. `adapter`, `tokens`, `context` `[num_rows]`: of each row, how many tokens
    it gets, and the KV slots that the first pass reads. The last rows are new: `prompts` `[num_new]` are the tokens of
    their prompts, `stored` those among them that are copied from rows that begin alike.
    """

    number: int
    adapter: NDArray[np.int32]
    tokens: NDArray[np.int64]
    context: NDArray[np.int64]
    prompts: NDArray[np.int64]
    stored: NDArray[np.int64]

    def seconds(self, cost: CostModel, ranks: NDArray[np.float64], merged: int | None) -> float:
        """All passes together; the cost model is linear, so sums are enough."""
        new, prompts = len(self.prompts), (self.prompts - self.stored).astype(np.float64)
        computed = self.tokens.astype(np.float64)
        # The first token of a new row comes out of its prefill.
        decode_rows = float(computed.sum()) - new
        if new:
            computed[-new:] += prompts - 1
        unmerged = lora_load(self.adapter, computed, ranks, merged_adapter=merged, kernel=cost.kernel)
        load = replace(
            unmerged,
            prefill_tokens=float(prompts.sum()),
            prefill_pairs=float(prompt_pairs(prompts, self.stored).sum()),
            decode_rows=decode_rows,
            context_tokens=float((self.context * self.tokens + self.tokens * (self.tokens - 1) / 2).sum()),
        )
        again = StepLoad(num_adapters=unmerged.num_adapters, rank_sum=unmerged.rank_sum)
        repeated = float(cost.step_seconds(again)) * (self.number - 1) if self.number > 1 else 0.0
        return float(cost.step_seconds(load)) + repeated
