"""Decides when a sequence is finished, and detokenises it: stop tokens, stop strings, `max_tokens`. Reasoning is split
from the text, and tool calls are read from it, where the row asks for that.

Stop strings are searched as if the text came character by character: the first to be complete ends the row, however
its characters were spread over tokens; of several that end together the longest counts. A stop string that is the text
of a special token (which is not part of the text) stands for that token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from ...request import FinishReason, Result
from ...sequence import Sequence
from ..tokenizers.boundary import given_text, text_behind
from ..tokenizers.tokenizer import Detokenizer, Tokenizer, Tokenizers
from .choices import choice_of
from .reasoning import AnswerTokens, split_reasoning
from .token_rules import TokenRules
from .tool_calls import call_markers, parse_tool_calls


class Completion:
    """Watches sequences for their ends. Text is decoded while running only where stop strings need it."""

    def __init__(self, tokenizers: Tokenizers, rules: TokenRules) -> None:
        self._tokenizers = tokenizers
        self._rules = rules
        self._texts: dict[str, _TextSoFar] = {}

    def finish(self, sequence: Sequence) -> Result | None:
        """The result if the token just appended ends the sequence."""
        sampling, token_ids = sequence.request.sampling, sequence.token_ids
        may_end = len(token_ids) > sampling.min_tokens or sampling.is_constrained
        ends_by_token = may_end and token_ids[-1] in self._tokenizers.ends(sequence.request)
        is_complete = not ends_by_token and self._rules.is_complete(sequence)
        is_complete |= len(token_ids) == len(sampling.continuation_token_ids)
        is_last = ends_by_token or is_complete or len(token_ids) >= sampling.max_tokens
        if sampling.stop:
            text = self._text_before_stop(sequence, has_text=not ends_by_token, is_last=is_last)
            if text is not None:
                return self._result(sequence, token_ids, text, "stop")
        if not is_last:
            return None
        said = token_ids[:-1] if ends_by_token else token_ids
        text = self._text(sequence, said)
        return self._result(sequence, said, text, "stop" if ends_by_token or is_complete else "length")

    def _text(self, sequence: Sequence, said: Items[int]) -> str:
        """The text of tokens. A given or constrained text keeps the blank that it begins with, and a choice is the text
        that was listed.
        """
        sampling, tokenizer = sequence.request.sampling, self._tokenizer(sequence)
        if sampling.choice and sampling.reasoning is None:
            listed = choice_of(tokenizer, sequence.request, said)
            if listed is not None:
                return listed
        is_plain = sampling.reasoning is None and not sampling.tool_call_parser
        if is_plain and sampling.continuation_token_ids:
            return given_text(tokenizer, sequence.request.prompt_token_ids, said)
        if is_plain and sampling.is_constrained:
            return text_behind(tokenizer, sequence.request.prompt_token_ids, said)
        return tokenizer.decode(said)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence that ended or was aborted."""
        self._texts.pop(sequence.request.request_id, None)
        self._rules.forget(sequence)

    def _result(self, sequence: Sequence, token_ids: Items[int], text: str, reason: FinishReason) -> Result:
        """The outcome. `text`: text of `token_ids`, or its beginning up to a stop string."""
        sampling = sequence.request.sampling
        parser, markers = sampling.tool_call_parser, sampling.reasoning
        if not parser and markers is None:
            return sequence.result(text, reason)
        reasoning, tool_calls = None, None
        if parser:
            said = self._with_markers(sequence, token_ids, text, (*call_markers(parser), *(markers or ())))
            answer = said if markers is None else split_reasoning(said, markers)[1]
            tool_calls = parse_tool_calls(parser, answer)
        if markers is not None:
            whole = text
            reasoning, text = split_reasoning(self._with_markers(sequence, token_ids, whole, markers), markers)
            if sampling.is_constrained and reasoning is not None:
                # The whole answer is the grammar's: blanks at its beginning, and nothing of the token that ends the
                # reasoning.
                tokenizer = self._tokenizer(sequence)
                answer = tokenizer.decode(AnswerTokens(tokenizer, markers).add(token_ids))
                text = answer.removesuffix(tokenizer.decode(token_ids)[len(whole) :])
        return replace(sequence.result(text, reason), reasoning=reasoning, tool_calls=tool_calls)

    def _with_markers(self, sequence: Sequence, token_ids: Items[int], text: str, markers: Items[str]) -> str:
        """`text` with the special tokens that are parts of markers, up to the same place."""
        tokenizer = self._tokenizer(sequence)
        keep = tokenizer.special_tokens_in(markers)
        if not keep:
            return text
        with_markers = tokenizer.decode(token_ids, keep)
        left_out = tokenizer.decode(token_ids)[len(text) :]
        return with_markers.removesuffix(left_out)

    def _tokenizer(self, sequence: Sequence) -> Tokenizer:
        return self._tokenizers.of(sequence.request.adapter_id)

    def _text_before_stop(self, sequence: Sequence, *, has_text: bool, is_last: bool) -> str | None:
        """The text up to the first stop string, or None while none is complete. `has_text`: whether the last token is
        part of the text.
        """
        request_id, sampling = sequence.request.request_id, sequence.request.sampling
        if request_id not in self._texts:
            # a row from another engine has tokens already; its text so far is read from them
            self._texts[request_id] = _TextSoFar(self._tokenizer(sequence), sequence.token_ids[:-1])
        so_far = self._texts[request_id]
        known = so_far.text
        if has_text:
            so_far.add(sequence.token_ids[-1])
        if is_last:
            so_far.finish()
        if len(sequence.token_ids) < sampling.min_tokens:
            return None
        num_known = len(known) if so_far.text.startswith(known) else so_far.num_settled
        start = first_stop(so_far.text, sampling.stop, num_known)
        return None if start is None else so_far.text[:start]


class _TextSoFar:
    """A running sequence's text, as far as its characters are complete: always that of its tokens so far."""

    def __init__(self, tokenizer: Tokenizer, token_ids: Iterable[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._settled = ""
        self.text = ""
        for token_id in token_ids:
            self._settled += self._detokenizer.add(token_id)
        self.text = self._settled + self._detokenizer.held

    @property
    def num_settled(self) -> int:
        """Characters that no later token changes."""
        return len(self._settled)

    def add(self, token_id: int) -> None:
        self._settled += self._detokenizer.add(token_id)
        self.text = self._settled + self._detokenizer.held

    def finish(self) -> None:
        self._settled += self._detokenizer.finish()
        self.text = self._settled


def first_stop(text: str, stops: tuple[str, ...], num_known: int) -> int | None:
    """The beginning of the stop string that is complete first among those that end behind the first `num_known`
    characters, which were searched before. None: there is none.
    """
    ends = []
    for stop in stops:
        start = text.find(stop, max(num_known - len(stop) + 1, 0))
        if start >= 0:
            ends.append((start + len(stop), start))
    return min(ends)[1] if ends else None
