"""Forward passes of a simulated replica: what they do, and the seconds that the cost model gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..costs.cost import CostModel, StepLoad, lora_load, prompt_pairs


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Several forward passes of one batch. Arrays are by row, `[num_rows]`."""

    #: Forward passes.
    number: int
    #: Adapter of each row.
    adapter: NDArray[np.int32]
    #: Tokens that each row generates.
    tokens: NDArray[np.int64]
    #: Tokens of each row that had keys and values before.
    stored: NDArray[np.int64]
    #: Tokens of each row's prompt that are computed; 0 of a row that decodes.
    chunk: NDArray[np.int64]
    #: Tokens of all rows that are drawn at a temperature.
    drawn_tokens: int = 0
    #: Prompt tokens of all rows whose log-probabilities are asked.
    scored_tokens: int = 0

    def load(self, cost: CostModel, ranks: NDArray[np.float64], merged: int | None) -> StepLoad:
        """Work of all passes together, adapters counted once. The cost model is linear, so sums are enough."""
        is_prompt = self.chunk > 0
        after = self.stored + self.chunk
        # The first token of a row comes out of its prompt.
        decoded = self.tokens - (is_prompt & (self.tokens > 0))
        return lora_load(
            self.adapter,
            self.chunk + decoded,
            ranks,
            merged_adapter=merged,
            kernel=cost.kernel,
            prefill_tokens=float(self.chunk.sum()),
            prefill_pairs=float(prompt_pairs(self.chunk, self.stored).sum()),
            decode_rows=float(decoded.sum()),
            drawn_tokens=float(self.drawn_tokens),
            scored_tokens=float(self.scored_tokens),
            context_tokens=float(after[is_prompt].sum() + (after * decoded + decoded * (decoded + 1) / 2).sum()),
        )

    def seconds(self, load: StepLoad, cost: CostModel) -> float:
        """Seconds of all passes with this load: each pays for the weights and for the adapters."""
        seconds = float(cost.step_seconds(load))
        if self.number > 1:
            again = StepLoad(num_adapters=load.num_adapters, rank_sum=load.rank_sum)
            seconds += float(cost.step_seconds(again)) * (self.number - 1)
        return seconds

    def totals(self, load: StepLoad) -> NDArray[np.float64]:
        """Work of all passes: the fields of `StepTotals` in order, float64 `[13]`."""
        given: Any = load
        has_lora, is_mixed = given.num_adapters > 0, given.prefill_tokens > 0 and given.decode_rows > 0
        of_adapters = (self.number * has_lora, self.number * given.num_adapters, self.number * given.rank_sum)
        others = (given.rank_tokens, given.prefill_pairs, given.lora_tokens, is_mixed, self.drawn_tokens)
        rows = (self.number, given.prefill_tokens, given.decode_rows, given.context_tokens)
        return np.array((*rows, *of_adapters, *others, self.scored_tokens), dtype=np.float64)


def cut_passes(
    unstored: NDArray[np.int64], remaining: NDArray[np.int64], num_passes: int, budget: int
) -> tuple[NDArray[np.int64], ...]:
    """Work of served rows in `num_passes` passes: prompt tokens computed, tokens generated, and the pass in which the
    prompt ends (0: before). `unstored`, `remaining` int64 `[num_rows]`: tokens to compute before a row decodes, and
    tokens still to generate. `budget`: prompt tokens of one pass.

    Decoding rows get a token in each pass; prompts are computed in order, and the last chunk gives a token too.
    """
    most = np.minimum(remaining, num_passes)
    if not unstored.any():
        return unstored, most, unstored
    ahead = np.cumsum(unstored) - unstored
    chunk = np.clip(num_passes * budget - ahead, 0, unstored)
    is_prompt = unstored > 0
    prompt_end = np.where(is_prompt, -(-(ahead + unstored) // budget), 0)
    tokens = np.clip(num_passes - prompt_end + is_prompt, 0, most)
    return chunk, np.where(chunk < unstored, 0, tokens), prompt_end
