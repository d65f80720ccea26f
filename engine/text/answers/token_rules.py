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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.launch import to_device
from ....kernels.token_mask import mask_tokens_
from ....kernels.token_penalties import PenalisedRow, penalise_tokens_
from ...errors import TokenizerError
from ...request import SAMPLING_OPTIONS, SamplingParams
from ...sequence import Sequence
from ...structured_output import CONSTRAINTS
from ..tokenizers.tokenizer import Tokenizers

if TYPE_CHECKING:
    from .grammar import Grammars

_MOST_BAD_WORDS_KEPT = 256
# Options that are at their defaults in rows without these rules: penalties, and all options whose kinds are known by
# themselves.
_PENALTIES: dict[str, Any] = {
    name: SAMPLING_OPTIONS[name].default for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
}
_KNOWN_KINDS = _PENALTIES | {name: SAMPLING_OPTIONS[name].default for name in (*CONSTRAINTS, "min_p")}


class TokenRules:
    """Decides which tokens rows may have next. `tokenizers`: what their tokens mean."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._grammars: Grammars | None = None
        self._of_prompts: dict[str, NDArray[np.int64]] = {}
        self._kinds: dict[str, tuple[SamplingParams, _Kind]] = {}
        self._bad_words = lru_cache(_MOST_BAD_WORDS_KEPT)(self._encode_bad_words)
        self._problems: dict[str, str] = {}

    @property
    def num_compiled_grammars(self) -> int:
        """Grammars compiled so far."""
        return 0 if self._grammars is None else self._grammars.num_compiled

    def apply_(self, logits: Tensor, sequences: Items[Sequence], *, checks_later: bool = False) -> None:
        """Apply the rows' rules to `logits` [num_sequences, vocab_size] in place; minus infinity is impossible.

        Where a row's grammar has grown too complex, or its adapter's own tokenizer fails, no token is left.
        `checks_later`: grammars of rows that `refused` can check are left to it.
        """
        kinds = [self._kind(sequence) for sequence in sequences]
        masked = [i for i, kind in enumerate(kinds) if kind.is_constrained and not (checks_later and kind.is_checkable)]
        self._mask_(logits, sequences, masked)
        penalised = []
        for i, (sequence, kind) in enumerate(zip(sequences, kinds, strict=True)):
            if len(sequence.token_ids) < kind.min_tokens and not self.is_complete(sequence):
                row = logits[i]
                row[self._known(self.stop_tokens(sequence), row)] = -torch.inf
            if kind.has_others:
                self._forbid_(logits[i], sequence)
            if kind.is_penalised:
                penalised.append(self._penalised(i, sequence))
        penalise_tokens_(logits, penalised)
        for i, (sequence, kind) in enumerate(zip(sequences, kinds, strict=True)):
            if kind.has_least:
                # p_i >= min_p * p_max at the row's temperature
                row, sampling = logits[i], sequence.request.sampling
                row.masked_fill_(row < row.max() + sampling.temperature * math.log(sampling.min_p), -torch.inf)

    def refused(self, sequences: Items[Sequence], tokens: Items[int], vocab_size: int) -> list[int]:
        """Places of tokens, chosen after `apply_(checks_later=True)`, that grammars do not allow.

        To check a token costs a tenth of a mask or less, and most tokens are allowed. Rows keep allowed ones.
        """
        checkable = [i for i, s in enumerate(sequences) if tokens[i] >= 0 and self._kind(s).is_checkable]
        if not checkable:
            return []
        grammars = self._loaded_grammars()
        return [i for i in checkable if not grammars.takes(sequences[i], tokens[i], vocab_size)]

    def is_forced(self, sequence: Sequence, vocab_size: int) -> bool:
        """Whether the grammar of a row whose token was refused leaves one way to go on: few tokens are allowed."""
        return self._loaded_grammars().is_forced(sequence, vocab_size)

    def allowed(self, sequences: Items[Sequence], vocab_size: int) -> NDArray[np.int32]:
        """A bit for each token that grammars allow these rows, [num_sequences, num_words]."""
        return self._loaded_grammars().allowed(sequences, vocab_size)

    def stop_tokens(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens to withhold until `min_tokens`: all that could end the row, and the base's own ends."""
        return self._tokenizers.stop_tokens(sequence.request)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the row's grammar allows its end and nothing else."""
        return self._grammars is not None and self._grammars.is_complete(sequence)

    def problem_of(self, sequence: Sequence) -> str | None:
        """Why an adapter's own tokenizer has left a row without tokens."""
        request_id = sequence.request.request_id
        of_grammar = None if self._grammars is None else self._grammars.problems.get(request_id)
        return of_grammar or self._problems.get(request_id)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._problems.pop(sequence.request.request_id, None)
        self._of_prompts.pop(sequence.request.request_id, None)
        self._kinds.pop(sequence.request.request_id, None)
        if self._grammars is not None:
            self._grammars.forget(sequence)

    def _kind(self, sequence: Sequence) -> _Kind:
        if sequence.is_scoring:
            return _NO_RULES
        request_id, sampling = sequence.request.request_id, sequence.request.sampling
        kept = self._kinds.get(request_id)
        if kept is None or kept[0] is not sampling:
            kept = self._kinds[request_id] = sampling, _Kind.of(sampling)
        return kept[1]

    def _forbid_(self, logits: Tensor, sequence: Sequence) -> None:
        """Forbid tokens and add biases, as the row's options say."""
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
            try:
                words = self._bad_words(sequence.request.adapter_id, sampling.bad_words)
            except TokenizerError as error:
                self._problems[sequence.request.request_id] = str(error)
                logits.fill_(-torch.inf)
                return
            ends = [word[-1] for word in words if _ends_with(sequence.token_ids, word[:-1])]
            logits[self._known(ends, logits)] = -torch.inf
        if sampling.logit_bias:
            biased, biases = map(np.array, zip(*sampling.logit_bias, strict=True))
            logits[_on(biased, logits.device)] += _on(biases, logits.device).to(logits.dtype)

    def _mask_(self, logits: Tensor, sequences: Items[Sequence], rows: list[int]) -> None:
        """Leave the tokens that the grammars of these rows allow."""
        if not rows:
            return
        allowed = self.allowed([sequences[i] for i in rows], logits.shape[1])
        mask_tokens_(logits, _on(allowed, logits.device), None if len(rows) == len(logits) else rows)

    def _loaded_grammars(self) -> Grammars:
        if self._grammars is None:
            from .grammar import Grammars  # engines without grammars load no library for them

            self._grammars = Grammars(self._tokenizers, torch.get_num_threads())
        return self._grammars

    def _penalised(self, place: int, sequence: Sequence) -> PenalisedRow:
        sampling = sequence.request.sampling
        penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        prompt = self._prompt_tokens(sequence) if sampling.repetition_penalty != 1.0 else _NO_TOKENS
        return PenalisedRow(place, prompt, sequence.token_ids, *penalties)

    @staticmethod
    def _known(token_ids: Iterable[int], logits: Tensor) -> Tensor:
        """The tokens that the model has; an adapter's tokenizer may have more."""
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


@dataclass(frozen=True, slots=True)
class _Kind:
    """The kinds of rules that a row has."""

    #: Tokens before which the row does not end.
    min_tokens: int = 0
    #: Whether it has a grammar.
    is_constrained: bool = False
    #: Whether its grammar may be looked at after its token was chosen. A greedy choice that is allowed is the largest
    #: of the allowed ones. A draw that is allowed, or else a new one among the allowed tokens, has the distribution of
    #: a draw among these; not where a cut depends on which are left.
    is_checkable: bool = False
    #: Whether it has rules beside its grammar, penalties, `min_p` and `min_tokens`.
    has_others: bool = False
    #: Whether it has penalties.
    is_penalised: bool = False
    #: Whether tokens need a least probability (`min_p`).
    has_least: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams) -> _Kind:
        has_cuts = sampling.top_k != 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        is_checkable = sampling.is_constrained and (sampling.temperature == 0.0 or not has_cuts)
        return cls(
            sampling.min_tokens,
            sampling.is_constrained,
            is_checkable,
            replace(sampling, **_KNOWN_KINDS).has_rules,
            replace(sampling, **_PENALTIES) != sampling,
            sampling.min_p > 0.0 and sampling.is_drawn,
        )


# The kind of rows that need no token any more.
_NO_RULES = _Kind()
_NO_TOKENS = np.zeros(0, np.int64)


def _on(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)


def _ends_with(token_ids: Items[int], end: Items[int]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == tuple(end)
