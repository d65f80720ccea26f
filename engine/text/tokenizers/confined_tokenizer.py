"""`ConfinedTokenizer`: an adapter's own tokenizer, which encodes and decodes in a confined process, from the bytes that
were audited.

A tokenizer is a stranger's program, too: its patterns may backtrack, its vocabulary may have no token for a text. What
breaks a limit costs its own row, and a tokenizer that keeps doing so its adapter's rows. An adapter whose
`tokenizer.json` is the base's, byte by byte, needs no confinement. `run` is the task of the process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from ....system.confinement import ConfinedError, confined
from ....system.untrusted import STOPS, shown_name
from ...errors import ModelFilesError, TokenizerError
from ...tokenizer_files import TOKENIZER, TokenizerFiles
from ..chat.conversation import Conversation
from ..chat.literal import LiteralText, RenderedMessages
from .tokenizer import DEFAULT_TEMPLATE, Tokenizer, named_by_model, templates_of

CPU_S = 3
MEMORY_BYTES = 2 << 30
_TASK = "engine.text.tokenizers.confined_tokenizer"
# Bytes of a tokenizer's file that are read in a second; each new process reads it once.
_BYTES_PER_CPU_S = 8 << 20
# Limits of one answer of the confined process, and of what one item may become: real tokenizers make a token of a
# character, and 500 blanks of a token.
_BATCH_ROWS, _BATCH_S, _BATCH_SIZE = 256, 1.0, 8 << 20
_MOST_TOKENS, _CHARACTERS_PER_TOKEN, _SPARE_CHARACTERS = 4 << 20, 1024, 64 << 10
# Seconds that a tokenizer may take for its first texts together, for each text more that it encodes, and for what it is
# given; real ones take a millionth of a second for a character, and less than ten for a token.
_FREE_S, _S_PER_TEXT, _CHARACTERS_PER_S, _TOKENS_PER_S = 12.0, 0.1, 250_000, 10_000
_GIVEN_UP = "the adapter's tokenizer has taken too long on other texts and is not tried again"
# Tokens whose bytes are asked for at once, and decodings of few tokens that are kept: rows with stop strings ask for
# each twice.
_TOKENS_AT_ONCE, _MOST_KEPT, _MOST_TOKENS_KEPT = 8192, 4096, 16
# Files of tokenizers that a confined process keeps.
_MOST_KEPT_BYTES = 128 << 20


def adapter_tokenizer(
    folder: Path, base: Path, sha256: str, *, now: datetime | None = None, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of an adapter's rows: its own, or the base's with the adapter's chat template. `sha256`: hash of
    the files that were audited.

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
        self._decode_few = lru_cache(_MOST_KEPT)(partial(_one, self, "decode"))
        self._seconds, self._allowed_s = 0.0, _FREE_S
        try:
            known = confined().run(_TASK, [*self._place, "describe", []], self._cpu_s, MEMORY_BYTES)
        except ConfinedError as error:
            raise ModelFilesError(f"{files.folder}: its tokenizer cannot be read: {error}. Save it again.") from None
        self.special_tokens = known["special_tokens"]
        self.eos_token_ids = tuple(known["eos_token_ids"])
        self.notes = tuple(known["notes"])
        self._vocab_size = known["vocab_size"]
        self._special_texts = known["special_texts"]
        self._special_ids = frozenset(self._special_texts.values())
        self.byte_tokens = frozenset(known["byte_tokens"])
        self._literals = LiteralText(None, {number: text for text, number in self._special_texts.items()})
        templates = templates_of(files, of_base, self.special_tokens, now=now, chat_template=chat_template)
        self._chat_template = templates.get(DEFAULT_TEMPLATE)
        self._tool_template = templates.get("tool_use") or self._chat_template

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included, as the process has reported them."""
        return int(self._vocab_size)

    def encode_batch(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int]]:
        """Tokens of many texts. Raises `TokenizerError`."""
        return _all(self.encode_each(texts, is_rendered=is_rendered))

    def encode_messages(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int]]:
        """Tokens of many rendered messages. Raises `TokenizerError`."""
        return _all(self.encode_messages_each(prompts, allow_special_tokens=allow_special_tokens))

    def encode_each(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int] | TokenizerError]:
        """Tokens of each text, encoded by the process, or the error of the text."""
        return self._asked("encode", list(texts), is_rendered)

    def encode_messages_each(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int] | TokenizerError]:
        """Tokens of each rendered message, encoded by the process, or the error of the message."""
        given = [[prompt.text, dict(prompt.stand_ins)] for prompt in prompts]
        return self._asked("encode_messages", given, allow_special_tokens)

    def decode(self, token_ids: Sequence[int], keep: Collection[int] = ()) -> str:
        """Text of generated tokens, decoded by the process; texts of few tokens are kept. Raises `TokenizerError`."""
        if not token_ids:
            return ""
        kept = tuple(sorted({token for token in token_ids if token in keep})) if keep else ()
        if len(token_ids) > _MOST_TOKENS_KEPT:
            return str(_one(self, "decode", tuple(token_ids), kept))
        return str(self._decode_few(tuple(token_ids), kept))

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token adds to a text, from the process. Raises `TokenizerError`."""
        starts = range(0, len(token_ids), _TOKENS_AT_ONCE)
        parts = [list(token_ids[start : start + _TOKENS_AT_ONCE]) for start in starts]
        return [text.encode("latin-1") for texts in _all(self._asked("bytes", parts, None)) for text in texts]

    @cached_property
    def for_grammars(self) -> _GrammarVocabulary:
        """The tokens in llguidance's form, which encodes by the process. Raises `TokenizerError`."""
        return _GrammarVocabulary(self)

    def special_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Numbers of the texts that are special tokens."""
        return tuple(self._special_texts[text] for text in texts if text in self._special_texts)

    def _asked(self, operation: str, items: list[Any], option: Any) -> list[Any]:
        """The process's answer for each item, or the error why there is none."""
        found: list[Any] = []
        batch_rows = _BATCH_ROWS
        while len(found) < len(items):
            if self._seconds > self._allowed_s:
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
            self._allowed_s += sum(_allowed_s(operation, item) for item in batch[: len(answers)])
            found += [TokenizerError(answer) if is_error else answer for is_error, answer in answers]
        return found


class _GrammarVocabulary:
    """The tokens of a confined tokenizer in llguidance's form, which asks for the tokens of a text where a grammar
    leaves one way to go on. An error there makes the row's mask empty.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ConfinedTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = (*tokenizer.eos_token_ids, 0)[0]
        self.tokens = tokenizer.bytes_of(range(tokenizer.vocab_size))
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text], is_rendered=True)[0]


class MissingTokenizer(Tokenizer):
    """Stands for an adapter's tokenizer that cannot be used now: each of its rows gets the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._chat_template = None
        self.special_tokens = {}
        self.eos_token_ids = ()
        self.notes = ()
        self.byte_tokens = frozenset()
        self._special_texts = {}
        self._special_ids = frozenset()
        self.num_end_tokens = 0

    def render_messages(
        self, conversations: Sequence[Conversation], *, allow_special_tokens: bool = False
    ) -> list[RenderedMessages | TokenizerError]:
        """The reason as an error, for each conversation."""
        return [TokenizerError(self._reason) for _ in conversations]

    def render_values(self, rows: Sequence[Any], *_: Any, **options: Any) -> list[RenderedMessages | TokenizerError]:
        """The reason as an error, for each row."""
        return [TokenizerError(self._reason) for _ in rows]

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
        """No numbers."""
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
    start_s, size = time.process_time(), 0
    answers: list[tuple[bool, Any]] = []
    for item in items:
        try:
            answers.append((False, _answer(tokenizer, operation, item, option)))
            size += len(answers[-1][1])
        except TokenizerError as error:
            answers.append((True, str(error)))
        except STOPS:
            raise
        except BaseException as error:
            # Plain `Exception`, and `PanicException`, which is none.
            answers.append((True, f"the adapter's tokenizer fails on it ({shown_name(str(error))})"))
        if time.process_time() - start_s > _BATCH_S or size > _BATCH_SIZE:
            break
    return answers, time.process_time() - start_s


def _answer(tokenizer: Tokenizer, operation: str, item: Any, option: Any) -> Any:
    if operation == "decode":
        return _bounded(
            tokenizer.decode(item, frozenset(option)), _SPARE_CHARACTERS + _CHARACTERS_PER_TOKEN * len(item)
        )
    if operation == "bytes":
        return [found.decode("latin-1") for found in tokenizer.bytes_of(item)]
    if operation == "encode":
        return _bounded(tokenizer.encode_batch([item], is_rendered=option)[0], _MOST_TOKENS)
    assert operation == "encode_messages", operation
    prompt = RenderedMessages(*item)
    return _bounded(tokenizer.encode_messages([prompt], allow_special_tokens=option)[0], _MOST_TOKENS)


def _bounded(found: Any, most: int) -> Any:
    if len(found) > most:
        things = "characters of its tokens" if isinstance(found, str) else "tokens of it"
        raise TokenizerError(f"the adapter's tokenizer makes more than {most} {things}")
    return found


def _tokenizer(folder: str, sha256: str, base: str, base_sha256: str) -> Tokenizer:
    """The tokenizer of files with these hashes, which may stand in several folders."""
    key = (sha256, base_sha256, *_named(Path(folder)))
    kept = _kept.pop(key, None)
    if kept is None:
        files, of_base = TokenizerFiles.of(Path(folder), sha256), TokenizerFiles.of(Path(base), base_sha256)
        kept = Tokenizer.of_files(files, of_base, chat_template=""), sum(map(len, files.contents.values()))
    _kept[key] = kept  # the latest one is the last
    while sum(num_bytes for _, num_bytes in _kept.values()) > _MOST_KEPT_BYTES and len(_kept) > 1:
        del _kept[next(iter(_kept))]
    return kept[0]


# Hashes of files, and what the folder's model says of their class -> their tokenizer, and bytes of these files.
_kept: dict[tuple[str, ...], tuple[Tokenizer, int]] = {}
_named = lru_cache(None)(named_by_model)


def _one(tokenizer: ConfinedTokenizer, operation: str, item: Sequence[int], option: Any) -> Any:
    return _all(tokenizer._asked(operation, [item], option))[0]


def _all(found: list[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, TokenizerError):
            raise one
    return found


def _allowed_s(operation: str, item: Any) -> float:
    """Seconds that a tokenizer may take for an item."""
    if operation in ("decode", "bytes"):
        return len(item) / _TOKENS_PER_S
    return _S_PER_TEXT + len(item if operation == "encode" else item[0]) / _CHARACTERS_PER_S
