"""Decides when a sequence is finished, and detokenises it: stop tokens, stop strings, `max_tokens`.

Stop strings are searched as if the text came character by character: the first to be complete ends the row, however
its characters were spread over tokens; of several that end together the longest counts. A stop string that is the text
of a special token (which is not part of the text) stands for that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..request import Result, Sequence
from .tokenizer import Detokenizer, Tokenizer

OwnTokenizer = Callable[[str | None], Path | None]


class Completion:
    """Watches sequences for their ends. Text is decoded while running only where stop strings need it.

    `own_tokenizer(adapter_id)`: the adapter's folder if it ships a tokenizer; its rows are then decoded with it.
    """

    def __init__(self, model_folder: Path, own_tokenizer: OwnTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        base = Tokenizer.from_folder(model_folder)
        self.stop_token_ids = tuple(sorted({*eos_token_ids, *base.eos_token_ids}))
        self._own_tokenizer = own_tokenizer
        self._of_folder: dict[Path | None, Tokenizer] = {None: base}
        self._of_adapter: dict[str | None, Tokenizer] = {None: base}
        self._texts: dict[str, _TextSoFar] = {}

    def finish(self, sequence: Sequence) -> Result | None:
        """The result if the token just appended ends the sequence."""
        sampling, token_ids = sequence.request.sampling, sequence.token_ids
        ends_by_token = len(token_ids) > sampling.min_tokens and token_ids[-1] in self._ends(sequence)
        is_last = ends_by_token or len(token_ids) >= sampling.max_tokens
        if sampling.stop:
            text = self._text_before_stop(sequence, has_text=not ends_by_token, is_last=is_last)
            if text is not None:
                return sequence.result(text, "stop")
        if not is_last:
            return None
        text = self._tokenizer(sequence).decode(token_ids[:-1] if ends_by_token else token_ids)
        return sequence.result(text, "stop" if ends_by_token else "length")

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._texts.pop(sequence.request.request_id, None)

    def stop_tokens(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens to withhold until `min_tokens`: all that could end the row, and the base's own ends."""
        tokenizer = self._tokenizer(sequence)
        special = tokenizer.special_token_ids(sequence.request.sampling.stop)
        return tuple({*self.stop_token_ids, *tokenizer.eos_token_ids, *special})

    def _ends(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens that end the row."""
        sampling = sequence.request.sampling
        tokenizer = self._tokenizer(sequence)
        special = tokenizer.special_token_ids(sampling.stop) if sampling.stop else ()
        return special if sampling.ignore_eos else (*self.stop_token_ids, *tokenizer.eos_token_ids, *special)

    def _tokenizer(self, sequence: Sequence) -> Tokenizer:
        adapter_id = sequence.request.adapter_id
        if adapter_id not in self._of_adapter:
            folder = self._own_tokenizer(adapter_id)
            if folder not in self._of_folder:
                assert folder is not None
                self._of_folder[folder] = Tokenizer.from_folder(folder)
            self._of_adapter[adapter_id] = self._of_folder[folder]
        return self._of_adapter[adapter_id]

    def _text_before_stop(self, sequence: Sequence, *, has_text: bool, is_last: bool) -> str | None:
        """The text up to the first stop string, or None while none is complete. `has_text`: of the last token."""
        request_id, sampling = sequence.request.request_id, sequence.request.sampling
        if request_id not in self._texts:
            # a row from another engine has tokens already; its text so far is read from them
            self._texts[request_id] = _TextSoFar(self._tokenizer(sequence), sequence.token_ids[:-1])
        so_far = self._texts[request_id]
        num_known = len(so_far.text)
        if has_text:
            so_far.add(sequence.token_ids[-1])
        if is_last:
            so_far.finish()
        if len(sequence.token_ids) < sampling.min_tokens:
            return None
        start = first_stop(so_far.text, sampling.stop, num_known)
        return None if start is None else so_far.text[:start]


class _TextSoFar:
    """A running sequence's text, as far as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Iterable[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self.text = ""
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        self.text += self._detokenizer.add(token_id)

    def finish(self) -> None:
        self.text += self._detokenizer.finish()


def first_stop(text: str, stops: tuple[str, ...], num_known: int) -> int | None:
    """Where the stop string begins that is complete first among those that end behind the first `num_known`
    characters, which were searched before. None: there is none."""
    ends = []
    for stop in stops:
        start = text.find(stop, max(num_known - len(stop) + 1, 0))
        if start >= 0:
            ends.append((start + len(stop), start))
    return min(ends)[1] if ends else None
