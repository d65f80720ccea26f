"""Encodes and decodes text with the tokenizer of a Hugging Face model folder. No torch, no transformers.

`tokenizer_backend.py` builds it from the folder's files. `tokenizer_config.json` may hold the chat template;
`chat_template.jinja` takes precedence. Tests compare the outcome with transformers' `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as TokenizerFile

from ....system.untrusted import STOPS, shown_name
from ...config import read_json
from ...errors import ModelFilesError, TokenizerError
from ...request import Request
from ...tokenizer_files import SETTINGS, TEMPLATE, TOOL_TEMPLATE, TokenizerFiles
from ..chat.chat_template import ChatTemplate
from ..chat.conversation import AS_USUAL, Conversation, RenderOptions
from ..chat.literal import LiteralText, RenderedMessages
from .expansion import long_token_problem
from .token_bytes import bytes_by_token
from .tokenizer_backend import build

# An incomplete UTF-8 character becomes complete within three more bytes, hence tokens. Beyond that, what
# looks incomplete is an invalid byte and will stay one.
_MAX_PENDING_TOKENS = 4
_MAX_CONTEXT_TOKENS = 8
# Tokens of bytes that stand together: what they say is known when another token comes.
_MAX_BYTE_TOKENS = 1024
_REPLACEMENT = "\ufffd"
# Names of chat templates where a model has several; transformers calls them so.
DEFAULT_TEMPLATE, _FOR_TOOLS = "default", "tool_use"
_TEMPLATE_FILES = {DEFAULT_TEMPLATE: TEMPLATE, _FOR_TOOLS: TOOL_TEMPLATE}
# Texts with more characters than this per token of room are looked at in pieces. A beginning has hardly more tokens
# than the text itself, however its last word is cut.
_CHARACTERS_PER_TOKEN = 16
_SPARE_TOKENS = 1000
_Item = TypeVar("_Item")


class Tokenizer:
    """One folder's tokenizer. Safe to share between threads."""

    def __init__(
        self,
        backend: TokenizerFile,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        tool_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._tool_template = tool_template or chat_template
        self.eos_token_ids = eos_token_ids
        #: Remarks on its files for people, as clauses.
        self.notes: tuple[str, ...] = ()
        added = backend.get_added_tokens_decoder()
        self._special_texts = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_texts.values())
        self._literals = LiteralText(backend, {i: token.content for i, token in added.items() if token.special})

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        base: Path | None = None,
        now: datetime | None = None,
        chat_template: str | None = None,
        sha256: str = "",
    ) -> Tokenizer:
        """Read a model folder, or an adapter's, which may ship a tokenizer, a chat template, or both; `base` is then
        the model folder that has the rest. `now`: the time that chat templates see, by default the clock's.
        `chat_template`: text of the one to use instead of the folders'. `sha256`: the hash that the folder's files must
        have ("": any).

        Raises `ModelFilesError` when `tokenizer.json` is missing or damaged, files have another hash, or the chat
        template is no template.
        """
        files = TokenizerFiles.of(Path(folder), sha256)
        of_base = None if base is None else TokenizerFiles.of(base)
        return cls.of_files(files, of_base, now=now, chat_template=chat_template)

    @classmethod
    def of_files(
        cls,
        files: TokenizerFiles,
        of_base: TokenizerFiles | None = None,
        *,
        now: datetime | None = None,
        chat_template: str | None = None,
    ) -> Tokenizer:
        """`from_folder` for files that were read before."""
        model_type, kind = named_by_model(files.folder)
        backend, settings = build(files, base=of_base, model_type=model_type, model_class=kind)
        special = settings.special_tokens
        templates = templates_of(files, of_base, special, now=now, chat_template=chat_template)
        eos_id = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        eos_ids = () if eos_id is None else (eos_id,)
        made = cls(backend, special, templates.get(DEFAULT_TEMPLATE), eos_ids, templates.get(_FOR_TOOLS))
        made.notes = settings.notes
        return made

    @property
    def special_texts(self) -> Mapping[str, int]:
        """Text of each special token -> its number."""
        return self._special_texts

    @property
    def special_ids(self) -> frozenset[int]:
        """Numbers of special tokens."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `messages` can be rendered."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations without tools."""
        return self._chat_template

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. A model's embedding may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def num_tokens_of_prompts(self) -> int:
        """Tokens up to the last one that prompts are made for: one that only fills up batches counts for nothing."""
        padding = self._backend.token_to_id(self.special_tokens.get("pad_token", ""))
        size = self.vocab_size
        return size - 1 if padding == size - 1 else size

    @property
    def for_grammars(self) -> Any:
        """The tokenizer as llguidance takes it: as a `tokenizer.json` would have it, tokens and settings of other files
        included.
        """
        return str(self._backend.to_str())

    def foreign_problem(self) -> str | None:
        """Why it may not serve as a stranger's tokenizer, as a clause: it may make long texts."""
        return long_token_problem(self._backend)

    def conflicts(self, other: Tokenizer) -> list[str]:
        """Added and special tokens that stand for another number in `other`, as plain sentences."""
        ours, theirs = ({t.content: i for i, t in x._backend.get_added_tokens_decoder().items()} for x in (self, other))
        moved = [(text, ours[text], theirs[text]) for text in ours.keys() & theirs.keys() if ours[text] != theirs[text]]
        return [f"token {text!r} is {mine} here and {base} in the base" for text, mine, base in sorted(moved)]

    def render(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions = AS_USUAL) -> str:
        """The prompt that asks the assistant to answer `messages`. Raises `TokenizerError`."""
        (prompt,) = self.render_all([Conversation(messages, options)])
        if isinstance(prompt, TokenizerError):
            raise prompt
        return prompt

    def render_all(
        self, conversations: Sequence[Conversation], *, must_be_whole: bool = False
    ) -> list[str | TokenizerError]:
        """The prompt of each of many conversations, or what `render` raises. Those with tools are rendered by the
        template that the model has for them, if it has one. `must_be_whole`: see `ChatTemplate.render_all`.
        """
        if self._chat_template is None:
            return [_no_template() for _ in conversations]
        plain_template = partial(self._chat_template.render_all, must_be_whole=must_be_whole)
        if self._tool_template is self._chat_template:
            return plain_template(conversations)
        assert self._tool_template is not None, "a chat template is there"
        tool_template = partial(self._tool_template.render_all, must_be_whole=must_be_whole)
        plain = iter(plain_template([one for one in conversations if not one.options.tools]))
        with_tools = iter(tool_template([one for one in conversations if one.options.tools]))
        return [next(with_tools if one.options.tools else plain) for one in conversations]

    def render_messages(
        self, conversations: Sequence[Conversation], *, allow_special_tokens: bool = False
    ) -> list[RenderedMessages | TokenizerError]:
        """The prompts of rows, or why a row has none: also where a piece of its conversation does not reach the prompt.
        Texts of special tokens in messages, tools and variables stay text, unless they are allowed.
        """
        render = partial(self.render_all, must_be_whole=True)
        if allow_special_tokens:
            rendered = zip(render(conversations), conversations, strict=True)
            return [
                text if isinstance(text, TokenizerError) else RenderedMessages(text, {}, given.open_text)
                for text, given in rendered
            ]
        return self._literals.render(conversations, render)

    def render_values(
        self,
        rows: Sequence[Mapping[str, Any]],
        template: Callable[[str, Sequence[Mapping[str, Any]]], list[str | TokenizerError]],
        source: str,
        *,
        allow_special_tokens: bool = False,
    ) -> list[RenderedMessages | TokenizerError]:
        """The prompts that a template of the text `source` writes of rows' values, or why a row has none. Texts of
        special tokens in values stay text, unless they are allowed. `template`: renders a text with rows.
        """
        if not allow_special_tokens:
            return self._literals.render_values(rows, template, source)
        rendered = template(source, rows)
        return [text if isinstance(text, TokenizerError) else RenderedMessages(text, {}) for text in rendered]

    def encode_messages(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int]]:
        """Tokens of many rendered messages, on all cores; see `render_messages`. Raises `TokenizerError`."""
        encoded = self.encode_batch([prompt.text for prompt in prompts], is_rendered=True)
        if allow_special_tokens:
            return encoded
        with _no_tokens():
            return [
                token_ids if self._literals.is_as_usual(prompt, token_ids) else self._literals.encode(prompt)
                for prompt, token_ids in zip(prompts, encoded, strict=True)
            ]

    def encode_batch(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int]]:
        """Tokens of many texts, on all cores.

        Plain prompts get the special tokens that the model expects around them. `is_rendered`: the texts come from the
        chat template, which has written them. Raises `TokenizerError`.
        """
        with _no_tokens():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=not is_rendered)
        return [list(encoding.ids) for encoding in encodings]

    def encode_each(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int] | TokenizerError]:
        """`encode_batch`; a text without tokens gets its own error."""
        return _each(texts, partial(self.encode_batch, is_rendered=is_rendered))

    def encode_messages_each(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int] | TokenizerError]:
        """`encode_messages`; a prompt without tokens gets its own error."""
        return _each(prompts, partial(self.encode_messages, allow_special_tokens=allow_special_tokens))

    def encode_values_each(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int] | TokenizerError]:
        """Tokens of each prompt of `render_values`, with the special tokens that the model expects around plain
        prompts; a prompt without tokens gets its own error.
        """
        encoded = self.encode_messages_each(prompts, allow_special_tokens=allow_special_tokens)
        if all(isinstance(one, TokenizerError) for one in encoded):
            return encoded
        before, behind = self._around
        return [one if isinstance(one, TokenizerError) else [*before, *one, *behind] for one in encoded]

    def has_special_text(self, text: str) -> bool:
        """Whether a text has the text of a special token."""
        return self._literals.is_in(text)

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a very long text certainly has more tokens than this, found out without encoding all of it.

        Its beginning is encoded, then eight times as much and so on, until there are far more tokens than that. Raises
        `TokenizerError`.
        """
        size = _CHARACTERS_PER_TOKEN * max_tokens
        while size < len(text):
            encoded = self.encode_batch([text[:size]], is_rendered=True)[0]
            if len(encoded) > 2 * max_tokens + _SPARE_TOKENS:
                return True
            size *= 8
        return False

    def decode(self, token_ids: Sequence[int], keep: Collection[int] = ()) -> str:
        """Text of generated tokens, without special tokens other than those to `keep`."""
        if not keep:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=True))
        kept = [i for i in token_ids if i in keep or i not in self._special_ids]
        return str(self._backend.decode(kept, skip_special_tokens=False))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Text of tokens with special tokens."""
        return self.decode(token_ids, self._special_ids)

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token adds to a text."""
        return list(map(self._bytes_of, token_ids))

    @cached_property
    def _bytes_of(self) -> Callable[[int], bytes]:
        return bytes_by_token(self._backend)

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """Tokens of single bytes, of which the decoder makes characters: of all that stand together, or of none."""
        if self._backend.decoder is None or "ByteFallback" not in str(self._backend.decoder.__getstate__()):
            return frozenset()
        found = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in found if token is not None)

    @cached_property
    def num_end_tokens(self) -> int:
        """Special tokens that are put behind a plain prompt."""
        return len(self._around[1])

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens that are put before a plain prompt, and behind it."""
        bare, whole = (self.encode_batch(["a"], is_rendered=is_rendered)[0] for is_rendered in (True, False))
        start = next((s for s in range(len(whole)) if whole[s : s + len(bare)] == bare), 0)
        return whole[:start], whole[start + len(bare) :]

    def special_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Numbers of the texts that are special tokens: `decode` leaves them out."""
        ids = ((self._backend.token_to_id(text), text) for text in texts)
        return tuple(i for i, text in ids if i is not None and text in self._special_texts)

    def special_tokens_in(self, texts: Sequence[str]) -> frozenset[int]:
        """Special tokens that are parts of these texts: `decode` must keep them for the texts to be found."""
        found = (i for special, i in self._special_texts.items() if special and any(special in text for text in texts))
        return frozenset(found)


class Tokenizers:
    """The tokenizers of an engine: the base's, and those of adapters that ship one.

    `own_tokenizer(adapter_id)`: the adapter's own, which is asked for once; None where it ships none. `eos_token_ids`:
    the model's.
    """

    def __init__(
        self,
        model_folder: Path,
        own_tokenizer: Callable[[str], Tokenizer | None],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        base = Tokenizer.from_folder(model_folder)
        self._eos_token_ids = tuple(sorted({*eos_token_ids, *base.eos_token_ids}))
        self._own_tokenizer = own_tokenizer
        self._of_adapter: dict[str | None, Tokenizer] = {None: base}

    def of(self, adapter_id: str | None) -> Tokenizer:
        """The tokenizer of an adapter's rows."""
        if adapter_id is not None and adapter_id not in self._of_adapter:
            self._of_adapter[adapter_id] = self._own_tokenizer(adapter_id) or self._of_adapter[None]
        return self._of_adapter[adapter_id]

    def ends(self, request: Request) -> tuple[int, ...]:
        """Tokens that end a row."""
        sampling, tokenizer = request.sampling, self.of(request.adapter_id)
        asked = (*sampling.stop_token_ids, *(tokenizer.special_token_ids(sampling.stop) if sampling.stop else ()))
        return asked if sampling.ignore_eos else (*self._eos_token_ids, *tokenizer.eos_token_ids, *asked)

    def stop_tokens(self, request: Request) -> tuple[int, ...]:
        """All tokens that could end a row, and the base's own ends."""
        sampling, tokenizer = request.sampling, self.of(request.adapter_id)
        special = tokenizer.special_token_ids(sampling.stop)
        return tuple({*self._eos_token_ids, *tokenizer.eos_token_ids, *sampling.stop_token_ids, *special})


class Detokenizer:
    """Text of one sequence as its tokens arrive; never half a character.

    Decoding depends on what stands before (leading spaces, multi-byte characters), so each call decodes a short
    window of latest tokens twice, with and without the new one, and returns the difference. `keep`: as in `decode`.
    """

    def __init__(self, tokenizer: Tokenizer, keep: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._context: list[int] = []
        self._num_context_chars = 0
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete, or more bytes may follow."""
        self._pending.append(token_id)
        if token_id in self._tokenizer.byte_tokens and len(self._pending) < _MAX_BYTE_TOKENS:
            return ""
        text = self._text_of_pending()
        is_incomplete = text.endswith(_REPLACEMENT)
        return "" if is_incomplete and len(self._pending) < _MAX_PENDING_TOKENS else self._release(text)

    @property
    def held(self) -> str:
        """The text of tokens that `add` has not returned yet, as far as characters are complete. A later byte that is
        invalid may change it.
        """
        return self._text_of_pending().rstrip(_REPLACEMENT) if self._pending else ""

    def finish(self) -> str:
        """The text that is left when no more tokens come."""
        return self._release(self._text_of_pending())

    def _text_of_pending(self) -> str:
        return self._tokenizer.decode(self._context + self._pending, self._keep)[self._num_context_chars :]

    def _release(self, text: str) -> str:
        # Tokens without text (special ones) say nothing about the next one; what stood before them does.
        self._context = self._pending if text else (self._context + self._pending)[-_MAX_CONTEXT_TOKENS:]
        self._num_context_chars = len(self._tokenizer.decode(self._context, self._keep))
        self._pending = []
        return text


def _no_template() -> TokenizerError:
    return TokenizerError("this model has no chat template; give a prompt instead of messages")


@contextmanager
def _no_tokens() -> Iterator[None]:
    """Raise `TokenizerError` for whatever the library raises."""
    try:
        yield
    except (*STOPS, TokenizerError):
        raise
    except BaseException as error:
        # Plain `Exception`, and `PanicException`, which is none.
        raise TokenizerError(f"the tokenizer makes no tokens of it ({shown_name(str(error))})") from None


def _each(
    items: Sequence[_Item], encode: Callable[[Sequence[_Item]], list[list[int]]]
) -> list[list[int] | TokenizerError]:
    """Tokens of each item: `encode` gets all at once and, if one of them has no tokens, each by itself."""
    try:
        return list(encode(items))
    except TokenizerError as error:
        if len(items) == 1:
            return [error]
    return [found for item in items for found in _each([item], encode)]


def named_by_model(folder: Path) -> tuple[str, str]:
    """`model_type` and `tokenizer_class` of the model's own configuration, which name the tokenizer's class; "" for a
    missing one.
    """
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    return str(config.get("model_type") or ""), str(config.get("tokenizer_class") or "")


def templates_of(
    files: TokenizerFiles,
    base: TokenizerFiles | None,
    special_tokens: Mapping[str, str],
    *,
    now: datetime | None = None,
    chat_template: str | None = None,
) -> dict[str, ChatTemplate]:
    """Name -> chat template: the job's own text, else that of the folder's files, else that of its base's."""
    if chat_template is not None:
        sources = {DEFAULT_TEMPLATE: chat_template}
    else:
        sources = _template_sources(files) or (_template_sources(base) if base is not None else {})
    return {name: ChatTemplate(source, special_tokens, now) for name, source in sources.items()}


def _template_sources(files: TokenizerFiles) -> dict[str, str]:
    """Name -> text of the chat templates that a folder has and that are used: the default one, and one for tools."""
    in_files = {name: files.text(file) for name, file in _TEMPLATE_FILES.items() if file in files.contents}
    if in_files:
        return in_files if DEFAULT_TEMPLATE in in_files else {}
    named = files.json(SETTINGS).get("chat_template")
    if isinstance(named, list):
        entries = [entry for entry in named if isinstance(entry, Mapping)]
        found = {
            name: next((entry.get("template") for entry in entries if entry.get("name") == name), None)
            for name in (DEFAULT_TEMPLATE, _FOR_TOOLS)
        }
    else:
        found = {DEFAULT_TEMPLATE: named}
    for name, source in found.items():
        if source is not None and not isinstance(source, str):
            raise ModelFilesError(
                f"{files.folder / SETTINGS} chat_template: expected a string, or a list of "
                f"{{name, template}} with one named 'default', found {type(source).__name__} ({name})."
            )
    if found[DEFAULT_TEMPLATE] is None:
        return {}
    return {name: source for name, source in found.items() if source is not None}
