"""Texts of special tokens inside of messages, which are text there: only the chat template writes control tokens. The
same holds for tools, for the values of a template's variables, and for those of a prompt template.

Before they are rendered, each such text is replaced by one character that occurs nowhere in them. Texts that the
template writes differ then from texts that it was given, however the template moves, trims or repeats these.

Other texts become such a text only in the tokenizer, which may fold letters or blanks. They are known by their tokens:
a control token that stands for another text than its own is none of the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as TokenizerFile

from ...errors import TokenizerError
from .conversation import Conversation, RenderOptions

# Code points for private use, which no text has a reason to hold.
_FIRST, _FIRST_OWN, _LAST = 0xF0000, 0xF8000, 0xFFFFD
_ESCAPED = r"\udb"  # how such a code point begins in JSON of ASCII


@dataclass(frozen=True, slots=True)
class RenderedMessages:
    """A prompt that a chat template wrote. `stand_ins`: character in `text` -> the text that it stands for.
    `open_text`: text of the last message, where it is left open.
    """

    text: str
    stand_ins: Mapping[str, str]
    open_text: str = ""


class LiteralText:
    """Renders and encodes messages that hold the texts of special tokens. `special`: token id -> text. `backend`: None
    where another process encodes.
    """

    def __init__(self, backend: TokenizerFile | None, special: Mapping[int, str]) -> None:
        self._given_backend = backend
        self._special = {i: text for i, text in special.items() if text}
        self._ids = {text: i for i, text in self._special.items()}
        texts = sorted(set(self._special.values()), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def render(
        self,
        conversations: Sequence[Conversation],
        template: Callable[[Sequence[Conversation]], list[str | TokenizerError]],
    ) -> list[RenderedMessages | TokenizerError]:
        """The prompt that the template writes of each conversation, or an error: also where it writes such texts as
        escape sequences.
        """
        texts_beside = {one.options: _option_texts(one.options) for one in conversations}
        stand_ins = [self._stand_ins(texts_beside[one.options] + _texts(list(one.messages))) for one in conversations]
        given = [
            self._with_stand_ins(one, characters) if characters else one
            for one, characters in zip(conversations, stand_ins, strict=True)
        ]
        return [
            rendered if isinstance(rendered, TokenizerError) else _kept_apart(rendered, one, characters)
            for rendered, one, characters in zip(template(given), given, stand_ins, strict=True)
        ]

    def render_values(
        self,
        rows: Sequence[Mapping[str, Any]],
        template: Callable[[str, Sequence[Mapping[str, Any]]], list[str | TokenizerError]],
        source: str,
    ) -> list[RenderedMessages | TokenizerError]:
        """The prompt that a template of the text `source` writes of each row's values, or an error. Texts of special
        tokens are control tokens where `source` has them, and text where values bring or complete them.
        """
        texts = [_texts(row) for row in rows]
        stand_ins = list(map(self._stand_ins, texts))
        given = [
            _replaced(row, self._put(characters)) if characters else row
            for row, characters in zip(rows, stand_ins, strict=True)
        ]
        own: dict[str, str] = {}
        if self.is_in(source):
            own = self._stand_ins([source], set[str]().union(*(text for part in texts for text in part)), _FIRST_OWN)
        marked = self._put(own)(source) if own else source
        return [
            rendered if isinstance(rendered, TokenizerError) else self._of_values(rendered, row, characters, own)
            for rendered, row, characters in zip(template(marked, given), rows, stand_ins, strict=True)
        ]

    def is_in(self, text: str) -> bool:
        """Whether a text has the text of a special token."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def _of_values(
        self, rendered: str, row: Mapping[str, Any], characters: Mapping[str, str], own: Mapping[str, str]
    ) -> RenderedMessages | TokenizerError:
        """A rendered prompt whose special tokens are those that the template has. `own`: text of each of these -> its
        mark in `rendered`.
        """
        if (characters or own) and _is_escaped(rendered, row):
            return _escaped()
        stand_ins = {character: text for text, character in characters.items()}
        completed = self._stand_ins([rendered])
        if completed:
            rendered = self._put(completed)(rendered)
            stand_ins |= {character: text for text, character in completed.items()}
        for text, mark in own.items():
            rendered = rendered.replace(mark, text)
        return RenderedMessages(rendered, stand_ins)

    def _stand_ins(self, texts: Sequence[str], taken: Collection[str] = (), first: int = _FIRST) -> dict[str, str]:
        """Text of a special token in texts -> a character that they lack. `taken`: further characters that are none.
        `first`: code point of the first that may be one.
        """
        if self._pattern is None:
            return {}
        found = {text for part in texts for text in self._pattern.findall(part)}
        if not found:
            return {}
        taken = set(taken).union(*texts)
        free = (chr(code) for code in range(first, _LAST) if chr(code) not in taken)
        return dict(zip(sorted(found), free, strict=False))

    def is_as_usual(self, prompt: RenderedMessages, token_ids: Sequence[int]) -> bool:
        """Whether the template's control tokens, and no others, are among the tokens that its text usually has."""
        if prompt.stand_ins or self._pattern is None:
            return not prompt.stand_ins
        written = [self._ids[text] for text in self._pattern.findall(prompt.text)]
        found = [i for i in token_ids if i in self._special]
        return found == written or self._without_unknown(found) == self._without_unknown(written)

    def encode(self, prompt: RenderedMessages) -> list[int]:
        """The tokens of a prompt. Text between two control tokens of the template is encoded as a whole."""
        assert self._pattern is not None, "no special tokens, hence no stand-ins for them"
        token_ids: list[int] = []
        as_usual = ""
        for i, part in enumerate(self._pattern.split(prompt.text)):
            if i % 2 or (prompt.stand_ins.keys().isdisjoint(part) and not self._has_control_tokens(part)):
                as_usual += part
                continue
            token_ids += self._encoded(self._backend, as_usual)
            as_usual = ""
            token_ids += self._as_text("".join(prompt.stand_ins.get(character, character) for character in part))
        return token_ids + self._encoded(self._backend, as_usual)

    def _with_stand_ins(self, conversation: Conversation, characters: Mapping[str, str]) -> Conversation:
        put, options = self._put(characters), conversation.options
        messages = [_replaced(message, put) for message in conversation.messages]
        if options.tools or options.variables:
            # Names of variables stay: they are the template's.
            variables = {name: _replaced(value, put) for name, value in options.variables.items()}
            options = replace(options, tools=_replaced(options.tools, put), variables=variables)
        return Conversation(messages, options)

    def _put(self, stand_ins: Mapping[str, str]) -> Callable[[str], str]:
        assert self._pattern is not None, "no special tokens, hence no stand-ins for them"
        pattern = self._pattern
        return lambda text: pattern.sub(lambda found: stand_ins[found[0]], text)

    def _has_control_tokens(self, text: str) -> bool:
        """Whether the tokenizer makes control tokens of a text that has none of their texts."""
        return bool(self._without_unknown([i for i in self._encoded(self._backend, text) if i in self._special]))

    def _as_text(self, text: str) -> list[int]:
        if not text:
            return []
        encoding = self._text_backend.encode(text, add_special_tokens=False)
        # The vocabulary may have such a text as a word, too: in pieces it is none.
        words = [
            (start, stop) if start < stop else (0, len(text))
            for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if i in self._special and (i != self._unknown or text[start:stop] in self._ids)
        ]
        if not words:
            return list(encoding.ids)
        token_ids: list[int] = []
        end = 0
        for start, stop in words:
            token_ids += self._as_text(text[end:start])
            for character in text[max(start, end) : stop]:
                token_ids += self._encoded(self._text_backend, character)
            end = max(stop, end)
        return token_ids + self._as_text(text[end:])

    def _without_unknown(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens without the one for what the vocabulary lacks, which is special in many tokenizers."""
        return [i for i in token_ids if i != self._unknown]

    @property
    def _backend(self) -> TokenizerFile:
        assert self._given_backend is not None, "another process encodes"
        return self._given_backend

    @cached_property
    def _unknown(self) -> int | None:
        model = json.loads(self._backend.to_str())["model"]
        by_name = self._backend.token_to_id(model.get("unk_token") or "")
        found: int | None = model.get("unk_id", by_name)
        return found

    @cached_property
    def _text_backend(self) -> TokenizerFile:
        """The tokenizer, for which special tokens are text."""
        backend = TokenizerFile.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @staticmethod
    def _encoded(backend: TokenizerFile, text: str) -> list[int]:
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids) if text else []


def _kept_apart(rendered: str, given: Conversation, characters: Mapping[str, str]) -> RenderedMessages | TokenizerError:
    if characters and _is_escaped(rendered, given.options.tools, given.options.variables, given.messages):
        return _escaped()
    stand_ins = {character: text for text, character in characters.items()}
    return RenderedMessages(rendered, stand_ins, given.open_text)


def _is_escaped(rendered: str, *given: Any) -> bool:
    """Whether a template has written stand-ins that are in `given` as escape sequences."""
    if _ESCAPED not in rendered.lower():
        return False
    return not any(_ESCAPED in text.lower() for value in given for text in _texts(value))


def _escaped() -> TokenizerError:
    return TokenizerError("the template writes texts of special tokens as escape sequences")


def _option_texts(options: RenderOptions) -> list[str]:
    return [*_texts(options.tools or ()), *_texts(list(options.variables.values()))]


def _texts(value: Any) -> list[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []


def _replaced(value: Any, put: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return put(value)
    if isinstance(value, Mapping):
        return {put(key) if isinstance(key, str) else key: _replaced(part, put) for key, part in value.items()}
    return [_replaced(part, put) for part in value] if isinstance(value, list | tuple) else value
