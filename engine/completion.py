"""When a sequence is finished, and its text: stop tokens, stop strings, `max_tokens`."""

from __future__ import annotations

from .config import ModelConfig
from .request import Result
from .sequence import Sequence
from .tokenizer import Detokenizer, Tokenizer


class Completion:
    """Watches sequences for their ends. Text is decoded while running only where stop strings need it."""

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids = tuple(sorted({*model.eos_token_ids, *tokenizer.eos_token_ids}))
        self._detokenizers: dict[str, Detokenizer] = {}
        self._texts: dict[str, str] = {}

    def finish(self, sequence: Sequence) -> Result | None:
        """The result if the token just appended ends the sequence."""
        sampling = sequence.request.sampling
        is_stop_token = sequence.token_ids[-1] in self.stop_token_ids and not sampling.ignore_eos
        if is_stop_token and len(sequence.token_ids) > sampling.min_tokens:
            return sequence.result(self._tokenizer.decode(sequence.token_ids[:-1]), "stop")
        if sampling.stop:
            text = self._text_before_stop(sequence)
            if text is not None:
                return sequence.result(text, "stop")
        if len(sequence.token_ids) >= sampling.max_tokens:
            return sequence.result(self._tokenizer.decode(sequence.token_ids), "length")
        return None

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._detokenizers.pop(sequence.request.request_id, None)
        self._texts.pop(sequence.request.request_id, None)

    def _text_before_stop(self, sequence: Sequence) -> str | None:
        """The text up to the first stop string, or None while none is complete.

        A stop string may span tokens, so the text so far is searched from where a match could begin.
        """
        sampling = sequence.request.sampling
        request_id = sequence.request.request_id
        detokenizer = self._detokenizers.setdefault(request_id, self._tokenizer.detokenizer())
        known = self._texts.get(request_id, "")
        text = known + detokenizer.add(sequence.token_ids[-1])
        self._texts[request_id] = text
        if len(sequence.token_ids) < sampling.min_tokens:
            return None
        search_from = max(len(known) - max(map(len, sampling.stop)) + 1, 0)
        found = [at for stop in sampling.stop if (at := text.find(stop, search_from)) >= 0]
        return text[: min(found)] if found else None
