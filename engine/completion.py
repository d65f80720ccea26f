"""When a sequence is finished, and its text: stop tokens, stop strings, `max_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .request import Result
from .sequence import Sequence
from .tokenizer import Detokenizer, Tokenizer


class Completion:
    """Watches sequences for their ends. Text is decoded while running only where stop strings need it.

    `own_tokenizer(adapter_id)`: the adapter's folder if it ships a tokenizer; its rows are then decoded with it.
    """

    def __init__(
        self, model_folder: Path, own_tokenizer: Callable[[str | None], Path | None], eos_token_ids: tuple[int, ...]
    ) -> None:
        base = Tokenizer.from_folder(model_folder)
        self.stop_token_ids = tuple(sorted({*eos_token_ids, *base.eos_token_ids}))
        self._own_tokenizer = own_tokenizer
        self._tokenizers: dict[Path | None, Tokenizer] = {None: base}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._texts: dict[str, str] = {}

    def finish(self, sequence: Sequence) -> Result | None:
        """The result if the token just appended ends the sequence."""
        sampling = sequence.request.sampling
        if self._is_at_stop_token(sequence) and len(sequence.token_ids) > sampling.min_tokens:
            return sequence.result(self._decode(sequence, sequence.token_ids[:-1]), "stop")
        if sampling.stop:
            text = self._text_before_stop(sequence)
            if text is not None:
                return sequence.result(text, "stop")
        if len(sequence.token_ids) >= sampling.max_tokens:
            return sequence.result(self._decode(sequence, sequence.token_ids), "length")
        return None

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._detokenizers.pop(sequence.request.request_id, None)
        self._texts.pop(sequence.request.request_id, None)

    def _is_at_stop_token(self, sequence: Sequence) -> bool:
        if sequence.request.sampling.ignore_eos:
            return False
        token_id = sequence.token_ids[-1]
        return token_id in self.stop_token_ids or token_id in self._tokenizer(sequence).eos_token_ids

    def _tokenizer(self, sequence: Sequence) -> Tokenizer:
        folder = self._own_tokenizer(sequence.request.adapter_id)
        if folder not in self._tokenizers:
            assert folder is not None
            self._tokenizers[folder] = Tokenizer.from_folder(folder)
        return self._tokenizers[folder]

    def _decode(self, sequence: Sequence, token_ids: list[int]) -> str:
        return self._tokenizer(sequence).decode(token_ids)

    def _text_before_stop(self, sequence: Sequence) -> str | None:
        """The text up to the first stop string, or None while none is complete.

        A stop string may span tokens, so the text so far is searched from where a match could begin.
        """
        sampling = sequence.request.sampling
        request_id = sequence.request.request_id
        if request_id not in self._detokenizers:
            # a row from another engine brings tokens along; its text so far is read from them
            self._detokenizers[request_id] = detokenizer = Detokenizer(self._tokenizer(sequence))
            self._texts[request_id] = "".join(map(detokenizer.add, sequence.token_ids[:-1]))
        known = self._texts[request_id]
        text = known + self._detokenizers[request_id].add(sequence.token_ids[-1])
        self._texts[request_id] = text
        if len(sequence.token_ids) < sampling.min_tokens:
            return None
        search_from = max(len(known) - max(map(len, sampling.stop)) + 1, 0)
        found = [at for stop in sampling.stop if (at := text.find(stop, search_from)) >= 0]
        return text[: min(found)] if found else None
