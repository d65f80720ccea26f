"""`ConfinedTokenizer`: an adapter's own tokenizer, encoding in a confined process, from the bytes that were audited.

A tokenizer is a stranger's program, too: its patterns may backtrack, its vocabulary may have no token for a text. A
text that breaks a limit costs its own row, and a tokenizer that keeps doing so its adapter's rows. An adapter whose
`tokenizer.json` is the base's, byte by byte, needs no confinement. `run` is the task of the process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..confinement import ConfinedError, confined
from ..errors import ChatTemplateError, ModelFilesError, TokenizerError
from ..tokenizer_files import TOKENIZER, TokenizerFiles
from .conversation import Conversation
from .literal import LiteralText, RenderedMessages
from .tokenizer import DEFAULT_TEMPLATE, Tokenizer, templates_of

CPU_S = 3
MEMORY_BYTES = 2 << 30
_TASK = "engine.text.confined_tokenizer"
# Reading a tokenizer's file, which each new process does once.
_BYTES_PER_CPU_S = 8 << 20
# One answer of the confined process.
_BATCH_ROWS, _BATCH_S = 256, 1.0
# Seconds that a tokenizer may take for its first texts together, for each one more and for their characters; real ones
# take a millionth of a second for each character.
_FREE_S, _S_PER_TEXT, _CHARACTERS_PER_S = 12.0, 0.1, 250_000
_GIVEN_UP = "the adapter's tokenizer has taken too long on other texts and is not tried again"


def adapter_tokenizer(
    folder: Path, base: Path, sha256: str, *, now: datetime | None = None, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of an adapter's rows: its own, or the base's with the adapter's chat template. `sha256`: of the
    files that were audited.

    Raises `ModelFilesError` when the folder holds others by now, and `NoProcessError`.
    """
    files, of_base = TokenizerFiles.of(folder, sha256), TokenizerFiles.of(base)
    if not files.has_vocabulary or files.contents.get(TOKENIZER) == of_base.contents.get(TOKENIZER):
        return Tokenizer.of_files(files, of_base, now=now, chat_template=chat_template)
    return ConfinedTokenizer(files, of_base, now=now, chat_template=chat_template)


class ConfinedTokenizer(Tokenizer):
    """A tokenizer of which this process knows the special tokens only."""

    def __init__(
        self,
        files: TokenizerFiles,
        of_base: TokenizerFiles,
        *,
        now: datetime | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._place = [str(files.folder), files.sha256, str(of_base.folder), of_base.sha256]
        self._cpu_s = CPU_S + 1 + sum(map(len, files.contents.values())) // _BYTES_PER_CPU_S
        self._seconds = 0.0
        self._num_texts = 0
        self._num_characters = 0
        try:
            known = confined().run(_TASK, [*self._place, "describe", []], self._cpu_s, MEMORY_BYTES)
        except ConfinedError as error:
            raise ModelFilesError(f"{files.folder}: its tokenizer cannot be read: {error}. Save it again.") from None
        self.special_tokens = known["special_tokens"]
        self.eos_token_ids = tuple(known["eos_token_ids"])
        self.notes = tuple(known["notes"])
        self._vocab_size = known["vocab_size"]
        self._special_texts = known["special_texts"]
        self.byte_tokens = frozenset(known["byte_tokens"])
        self._special_ids = frozenset(self._special_texts.values())
        self.byte_tokens = frozenset(known["byte_tokens"])
        self._literals = LiteralText(None, {number: text for text, number in self._special_texts.items()})
        templates = templates_of(files, of_base, self.special_tokens, now=now, chat_template=chat_template)
        self._chat_template = templates.get(DEFAULT_TEMPLATE)
        self._tool_template = templates.get("tool_use") or self._chat_template

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return int(self._vocab_size)

    def encode_batch(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int]]:
        """See `Tokenizer`."""
        return _all(self.encode_each(texts, is_rendered=is_rendered))

    def encode_messages(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int]]:
        """See `Tokenizer`."""
        return _all(self.encode_messages_each(prompts, allow_special_tokens=allow_special_tokens))

    def encode_each(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int] | TokenizerError]:
        """See `Tokenizer`."""
        return self._asked("encode", list(texts), is_rendered)

    def encode_messages_each(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int] | TokenizerError]:
        """See `Tokenizer`."""
        given = [[prompt.text, dict(prompt.stand_ins)] for prompt in prompts]
        return self._asked("encode_messages", given, allow_special_tokens)

    def decode(self, token_ids: Sequence[int], keep: Collection[int] = ()) -> str:
        """See `Tokenizer`. Raises `TokenizerError`."""
        (found,) = self._asked("decode", [list(token_ids)], list(keep))
        if isinstance(found, TokenizerError):
            raise found
        return str(found)

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """See `Tokenizer`. Raises `TokenizerError`."""
        return [bytes(found) for found in _all(self._asked("bytes", [list(token_ids)], None))[0]]

    def special_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return tuple(self._special_texts[text] for text in texts if text in self._special_texts)

    def _asked(self, operation: str, items: list[Any], option: Any) -> list[Any]:
        """What the process answers for each item, or why there is no answer."""
        found: list[Any] = []
        batch_rows = _BATCH_ROWS
        while len(found) < len(items):
            allowed_s = _FREE_S + _S_PER_TEXT * self._num_texts + self._num_characters / _CHARACTERS_PER_S
            if self._seconds > allowed_s:
                return found + [TokenizerError(_GIVEN_UP)] * (len(items) - len(found))
            batch = items[len(found) : len(found) + batch_rows]
            try:
                question = [*self._place, operation, [batch, option]]
                answers, seconds = confined().run(_TASK, question, self._cpu_s, MEMORY_BYTES)
            except ConfinedError as error:
                self._seconds += self._cpu_s
                if len(batch) == 1:
                    found.append(TokenizerError(f"the adapter's tokenizer fails on it: {error}"))
                batch_rows = 1  # it is one of them
                continue
            self._seconds += seconds
            self._num_texts += len(answers)
            self._num_characters += sum(_size(item) for item in batch[: len(answers)])
            found += [TokenizerError(answer) if is_error else answer for is_error, answer in answers]
        return found


class MissingTokenizer(Tokenizer):
    """Stands for an adapter's tokenizer that cannot be used now: each of its rows gets the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.special_tokens = {}
        self.eos_token_ids = ()
        self.notes = ()
        self.byte_tokens = frozenset()
        self._special_texts = {}
        self._special_ids = frozenset()
        self._special_ids = frozenset()
        self.byte_tokens = frozenset()
        self.num_end_tokens = 0

    def render_messages(
        self, conversations: Sequence[Conversation], *, allow_special_tokens: bool = False
    ) -> list[RenderedMessages | ChatTemplateError]:
        """See `Tokenizer`."""
        return [ChatTemplateError(self._reason) for _ in conversations]

    def encode_batch(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int]]:
        """Raises `TokenizerError`."""
        raise TokenizerError(self._reason)

    def encode_messages(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int]]:
        """Raises `TokenizerError`."""
        raise TokenizerError(self._reason)

    def decode(self, token_ids: Sequence[int], keep: Collection[int] = ()) -> str:
        """Raises `TokenizerError`."""
        raise TokenizerError(self._reason)

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Raises `TokenizerError`."""
        raise TokenizerError(self._reason)

    def special_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """None."""
        return ()


def run(payload: Any) -> Any:
    """The task of the confined process: the folders of adapter and base, each with its hash; an operation; its items
    and its option. Answers to the first items, as many as come within a second, each with whether it is an error; and
    seconds.
    """
    *place, operation, given = payload
    tokenizer = _tokenizer(*place)
    if operation == "describe":
        return {
            "special_tokens": tokenizer.special_tokens,
            "special_texts": {text: i for text, i in tokenizer.special_texts.items() if text},
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "byte_tokens": list(tokenizer.byte_tokens),
            "vocab_size": tokenizer.vocab_size,
            "notes": list(tokenizer.notes),
        }
    items, option = given
    start_s = time.process_time()
    answers: list[tuple[bool, Any]] = []
    for item in items:
        try:
            answers.append((False, _answer(tokenizer, operation, item, option)))
        except TokenizerError as error:
            answers.append((True, str(error)))
        if time.process_time() - start_s > _BATCH_S:
            break
    return answers, time.process_time() - start_s


def _answer(tokenizer: Tokenizer, operation: str, item: Any, option: Any) -> Any:
    if operation == "encode":
        return tokenizer.encode_batch([item], is_rendered=option)[0]
    if operation == "encode_messages":
        return tokenizer.encode_messages([RenderedMessages(*item)], allow_special_tokens=option)[0]
    if operation == "bytes":
        return [list(found) for found in tokenizer.bytes_of(item)]
    assert operation == "decode", operation
    return tokenizer.decode(item, frozenset(option))


@lru_cache(maxsize=4)
def _tokenizer(folder: str, sha256: str, base: str, base_sha256: str) -> Tokenizer:
    files, of_base = TokenizerFiles.of(Path(folder), sha256), TokenizerFiles.of(Path(base), base_sha256)
    return Tokenizer.of_files(files, of_base, chat_template="")


def _all(found: list[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, TokenizerError):
            raise one
    return found


def _size(item: Any) -> int:
    return len(item) if isinstance(item, str) else len(item[0]) if item and isinstance(item[0], str) else len(item)
