"""Steps on a CPU: each is computed when it is launched."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from .decoder import Decoder
from .exact_decoder import ExactDecoder
from .sampler import StopTokens, sample
from .step_batch import PageLayout, StepEntry, build_step
from .step_runner import LaunchedStep


class HostRunner:
    """Runs a decoder over `memory` (the flat pool). A row's `stop_tokens` are withheld until its `min_tokens`."""

    steps_ahead = 0

    def __init__(self, decoder: Decoder, memory: Tensor, layout: PageLayout, stop_tokens: StopTokens) -> None:
        self._is_exact = isinstance(decoder, ExactDecoder)
        self._decoder = decoder
        self._memory = memory
        self._layout = layout
        self._stop_tokens = stop_tokens

    def launch(self, entries: Items[StepEntry]) -> LaunchedStep:
        """See `StepRunner`."""
        batch = build_step(entries, self._decoder.model, self._layout, self._memory.dtype, is_exact=self._is_exact)
        logits = self._decoder.forward(batch, self._memory)
        tokens = sample(logits, batch.sampled, self._stop_tokens) if batch.sampled else ([], [])
        return LaunchedStep(batch.sampled, lambda: tokens)
