"""Splits answers of models that reason: the text between two markers is reasoning, what follows is the completion.

Reasoning stands at the beginning of an answer, or nowhere. Where the prompt has its start marker already
(`is_begun_by`), the answer begins inside of it; prompts are looked at where their texts are known, never for the end
marker.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tokenizers.tokenizer import Detokenizer, Tokenizer


def split_reasoning(text: str, markers: tuple[str, str]) -> tuple[str | None, str]:
    """Reasoning and completion of an answer, blanks around both markers dropped. Reasoning is None where the answer
    does not begin with the start marker; where its end is missing, the completion is empty.
    """
    start, end = markers
    body = text.lstrip()
    if not body.startswith(start):
        return None, text
    reasoning, is_ended, completion = body.removeprefix(start).partition(end)
    return reasoning.strip(), completion.lstrip() if is_ended else ""


def is_begun_by(prompt: str, start: str) -> bool:
    """Whether a prompt ends with the start marker, and blanks."""
    return bool(start) and prompt.rstrip().endswith(start)


def is_open_in(text: str, markers: tuple[str, str]) -> bool:
    """Whether reasoning begins in a text, and does not end there."""
    start, end = markers
    return bool(start) and text.rfind(start) > text.rfind(end)


class AnswerTokens:
    """Splits a row's tokens, as they come, into those of its answer and those of its reasoning.

    The split is a function of the tokens alone. An answer that may reason, and has not begun, is both: `start_token`
    continues the start marker, any other token begins the answer.
    """

    def __init__(self, tokenizer: Tokenizer, markers: tuple[str, str]) -> None:
        start, self._end = markers
        self._detokenizer = Detokenizer(tokenizer, tokenizer.special_tokens_in([self._end]))
        self._start = tokenizer.encode_batch([start], is_rendered=True)[0] if start else []
        self._text = ""
        #: Tokens so far of what may be the start marker, or the answer.
        self.undecided: list[int] = []
        self.is_reasoning = not self._start
        self._is_answer = False

    @property
    def start_token(self) -> int | None:
        """The next token of the start marker; None once it is decided whether the answer begins with it."""
        return None if self.is_reasoning or self._is_answer else self._start[len(self.undecided)]

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add the row's next tokens. Returns those that the answer has gained: it begins with the token after the one
        that completes the end marker.
        """
        return [answer for token in token_ids for answer in self._next(token)]

    def _next(self, token: int) -> list[int]:
        if self._is_answer:
            return [token]
        if self.is_reasoning:
            self._read(token)
            return []
        is_start = token == self.start_token
        self.undecided.append(token)
        if is_start and len(self.undecided) < len(self._start):
            return []
        begun, self.undecided = self.undecided, []
        self.is_reasoning, self._is_answer = is_start, not is_start
        return [] if is_start else begun

    def _read(self, token: int) -> None:
        searched = max(len(self._text) - len(self._end) + 1, 0)
        self._text += self._detokenizer.add(token)
        self._is_answer = self._text.find(self._end, searched) >= 0
        self.is_reasoning = not self._is_answer
