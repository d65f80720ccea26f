"""Prompt and output lengths: from the Azure public trace when its file is given, drawn from a seed otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lorabatch.pipeline.planning.simulate import read_trace_lengths
from lorabatch.scheduler.estimates.lengths import AnswerLengths
from lorabatch.scheduler.simulation.synthetic import draw_lengths
from lorabatch.scheduler.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Pairs to draw from, int32 `[num_pairs]` each. `source`: what the report says about them."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    source: str

    def draw(
        self, generator: np.random.Generator, num_rows: int, *, scale: float = 1.0, most: int = 2000
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`num_rows` pairs with replacement; lengths times `scale`, between 1 and `most`."""
        chosen = generator.integers(0, len(self.prompt_tokens), num_rows)
        prompt, output = (np.rint(scale * column[chosen]) for column in (self.prompt_tokens, self.output_tokens))
        return np.clip(prompt, 1, most).astype(np.int32), np.clip(output, 1, most).astype(np.int32)


def read_trace(path: Path) -> Lengths:
    """`AzureLLMInferenceTrace_*.csv`: columns ContextTokens and GeneratedTokens."""
    prompt, output = read_trace_lengths(path)
    return Lengths(prompt, output, f"the lengths of {path.name} ({len(prompt)} requests, Azure public data set, 2023)")


def synthetic_lengths() -> Lengths:
    """Log-normal pairs with medians and spread like a conversation trace's."""
    generator = np.random.default_rng(7)
    prompt = draw_lengths(generator, 20_000, 600, 1.0, 4000)
    output = draw_lengths(generator, 20_000, 130, 0.8, 1000)
    return Lengths(prompt, output, "log-normal lengths (prompt median 600, output median 130)")


def kept_answers(job: Workload) -> dict[str | None, AnswerLengths]:
    """Adapter id -> lengths of its answers, as a job keeps them for later jobs. All rows must have an adapter."""
    assert job.output_tokens is not None
    is_cut = job.output_tokens == job.max_tokens
    return {
        job.adapters[number].adapter_id: AnswerLengths.of(
            (1, tokens, cut)
            for tokens, cut in zip(job.output_tokens[of_adapter].tolist(), is_cut[of_adapter].tolist(), strict=True)
        )
        for number in np.unique(job.adapter_index).tolist()
        for of_adapter in [job.adapter_index == number]
    }
