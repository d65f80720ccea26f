"""Applies to logits what rows ask of their next token, in this order:

1. tokens that are forbidden: all but the next one of a given continuation, all but `allowed_token_ids`, what a grammar
   does not go on with, the last tokens of `bad_words`, ends before `min_tokens`;
2. `logit_bias`;
3. penalties: `repetition_penalty` for tokens of prompt and completion, `frequency_penalty` and `presence_penalty` for
   those of the completion;
4. `min_p`.

Each is a function of the row's logits and tokens alone. Formulas and order are vLLM's, so that a job's numbers mean
here what they meant there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..request import Sequence
from .tokenizer import Tokenizers

if TYPE_CHECKING:
    from .grammar import Grammars

_MOST_BAD_WORDS_KEPT = 256


class TokenRules:
    """Which tokens rows may have next. `tokenizers`: what their tokens mean."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._grammars: Grammars | None = None
        self._of_prompts: dict[str, NDArray[np.int64]] = {}
        self._bad_words = lru_cache(_MOST_BAD_WORDS_KEPT)(self._encode_bad_words)

    @property
    def num_compiled_grammars(self) -> int:
        """Grammars compiled so far."""
        return 0 if self._grammars is None else self._grammars.num_compiled

    def apply_(self, logits: Tensor, sequences: Items[Sequence]) -> None:
        """Change `logits` [num_sequences, vocab_size] to what is left of them; minus infinity is impossible.

        Where a row's grammar has grown too complex nothing is left.
        """
        self._constrain_(logits, sequences)
        for row, sequence in zip(logits, sequences, strict=True):
            sampling = sequence.request.sampling
            if len(sequence.token_ids) < sampling.min_tokens and not self.is_complete(sequence):
                row[self._known(self.stop_tokens(sequence), row)] = -torch.inf
            if sampling.has_rules:
                self._forbid_(row, sequence)
                self._shift_(row, sequence)

    def stop_tokens(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens to withhold until `min_tokens`: all that could end the row, and the base's own ends."""
        return self._tokenizers.stop_tokens(sequence.request)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the row's grammar allows its end and nothing else."""
        return self._grammars is not None and self._grammars.is_complete(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._of_prompts.pop(sequence.request.request_id, None)
        if self._grammars is not None:
            self._grammars.forget(sequence)

    def _forbid_(self, logits: Tensor, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        allowed_ids = sampling.allowed_token_ids
        if sampling.continuation_token_ids:
            allowed_ids = sampling.continuation_token_ids[len(sequence.token_ids) :][:1]
        if allowed_ids:
            allowed = self._known(allowed_ids, logits)
            kept = logits[allowed]
            logits.fill_(-torch.inf)
            logits[allowed] = kept
        if sampling.bad_words:
            words = self._bad_words(sequence.request.adapter_id, sampling.bad_words)
            ends = [word[-1] for word in words if _ends_with(sequence.token_ids, word[:-1])]
            logits[self._known(ends, logits)] = -torch.inf

    def _constrain_(self, logits: Tensor, sequences: Items[Sequence]) -> None:
        rows = [i for i, sequence in enumerate(sequences) if sequence.request.sampling.is_constrained]
        if not rows:
            return
        if self._grammars is None:
            from .grammar import Grammars  # engines without grammars load no library for them

            self._grammars = Grammars(self._tokenizers)
        masks = _on(self._grammars.allowed([sequences[i] for i in rows], logits.shape[1]), logits.device)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        for row, mask in zip(rows, masks, strict=True):
            forbidden = ((mask[:, None] >> places) & 1) == 0
            logits[row].masked_fill_(forbidden.flatten()[: logits.shape[1]], -torch.inf)

    def _shift_(self, logits: Tensor, sequence: Sequence) -> None:
        sampling, device = sequence.request.sampling, logits.device
        if sampling.logit_bias:
            biased, biases = map(np.array, zip(*sampling.logit_bias, strict=True))
            logits[_on(biased, device)] += _on(biases, device).to(logits.dtype)
        if sampling.repetition_penalty != 1.0:
            seen = _on(np.union1d(self._prompt_tokens(sequence), sequence.token_ids).astype(np.int64), device)
            values, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if sequence.token_ids and (sampling.frequency_penalty or sampling.presence_penalty):
            generated, counts = np.unique(sequence.token_ids, return_counts=True)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            logits[_on(generated, device)] -= _on(penalties, device).to(logits.dtype)
        if sampling.min_p and sampling.temperature:
            # p_i >= min_p * p_max at the row's temperature
            least = logits.max() + sampling.temperature * math.log(sampling.min_p)
            logits.masked_fill_(logits < least, -torch.inf)

    @staticmethod
    def _known(token_ids: Iterable[int], logits: Tensor) -> Tensor:
        """Of these tokens, those that the model has; an adapter's tokenizer may have more."""
        return _on(np.array([token for token in token_ids if token < len(logits)], np.int64), logits.device)

    def _prompt_tokens(self, sequence: Sequence) -> NDArray[np.int64]:
        request = sequence.request
        if request.request_id not in self._of_prompts:
            self._of_prompts[request.request_id] = np.unique(np.array(request.prompt_token_ids, np.int64))
        return self._of_prompts[request.request_id]

    def _encode_bad_words(self, adapter_id: str | None, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word, at the beginning of a text and behind a blank."""
        texts = [blank + word.lstrip() for word in words for blank in ("", " ")]
        encoded = self._tokenizers.of(adapter_id).encode_batch(texts, is_rendered=True)
        return tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))


def _on(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _ends_with(token_ids: Items[int], end: Items[int]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == tuple(end)
