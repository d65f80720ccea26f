"""Encodes and decodes text with the tokenizer of a Hugging Face model folder. No torch, no transformers.

`tokenizer.json` holds the tokenizer, `tokenizer_config.json` (and the older `special_tokens_map.json`) names the
special tokens and may hold the chat template; `chat_template.jinja` takes precedence. What is put around a plain
prompt is written in `tokenizer.json`; the flags `add_bos_token` and `add_eos_token` beside it are for tokenizers
without that file. Tests compare the outcome with transformers' `AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizerFile

from ..config import read_json
from ..errors import ChatTemplateError, ModelFilesError
from ..request import Request
from ..untrusted import STOPS, read_regular, shown_name
from .chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from .conversation import AS_USUAL, Conversation, RenderOptions
from .expansion import expansion_problem, long_token_problem
from .literal import LiteralText, RenderedMessages

MAX_TOKENIZER_BYTES = 128 << 20  # those of 260,000 tokens have 35 MB
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# An incomplete UTF-8 character becomes complete within three more bytes, hence tokens. Beyond that, what
# looks incomplete is an invalid byte and will stay one.
_MAX_PENDING_TOKENS = 4
_MAX_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"
# Names of chat templates where a model has several; transformers calls them so.
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
# Texts with more characters than this per token of room are looked at in pieces. A beginning has hardly more tokens
# than the text itself, however its last word is cut.
_CHARACTERS_PER_TOKEN = 16
_SPARE_TOKENS = 1000


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
    ) -> Tokenizer:
        """Read a model folder, or an adapter's, which may ship a tokenizer, a chat template, or both; `base` is then
        the model folder that has the rest. `now`: the time that chat templates see, by default the clock's.
        `chat_template`: text of the one to use instead of the folders'.

        Raises `ModelFilesError` when `tokenizer.json` is missing or damaged, or the chat template is no
        template.
        """
        folder = Path(folder)
        home = folder if base is None or (folder / "tokenizer.json").exists() else base
        config = _read_optional(home / "tokenizer_config.json")
        special = _special_tokens(config, _read_optional(home / "special_tokens_map.json"))
        backend = _read_backend(home / "tokenizer.json")
        _mark_special(backend, special)
        if chat_template is not None:
            sources = {_DEFAULT: chat_template}
        else:
            sources = _template_sources(folder) or _template_sources(base or folder)
        made = {name: ChatTemplate(source, special, now) for name, source in sources.items()}
        eos_id = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        eos_ids = () if eos_id is None else (eos_id,)
        return cls(backend, special, made.get(_DEFAULT), eos_ids, made.get(_FOR_TOOLS))

    @property
    def has_chat_template(self) -> bool:
        """Whether `messages` can be rendered."""
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. A model's embedding may be larger."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def long_token_problem(self) -> str | None:
        """Why its tokens are too long, as a clause; None when they are not. For tokenizers of strangers."""
        return long_token_problem(self._backend)

    def conflicts(self, other: Tokenizer) -> list[str]:
        """Added and special tokens that stand for another number in `other`, as plain sentences."""
        ours, theirs = ({t.content: i for i, t in x._backend.get_added_tokens_decoder().items()} for x in (self, other))
        moved = [(text, ours[text], theirs[text]) for text in ours.keys() & theirs.keys() if ours[text] != theirs[text]]
        return [f"token {text!r} is {mine} here and {base} in the base" for text, mine, base in sorted(moved)]

    def render(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions = AS_USUAL) -> str:
        """The prompt that asks the assistant to answer `messages`. Raises `ChatTemplateError`."""
        (prompt,) = self.render_all([Conversation(messages, options)])
        if isinstance(prompt, ChatTemplateError):
            raise prompt
        return prompt

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | ChatTemplateError]:
        """The prompt of each of many conversations, or what `render` raises. Those with tools are rendered by the
        template that the model has for them, if it has one.
        """
        if self._chat_template is None:
            return [_no_template() for _ in conversations]
        if self._tool_template is self._chat_template:
            return self._chat_template.render_all(conversations)
        assert self._tool_template is not None, "a chat template is there"
        plain = iter(self._chat_template.render_all([one for one in conversations if not one.options.tools]))
        with_tools = iter(self._tool_template.render_all([one for one in conversations if one.options.tools]))
        return [next(with_tools if one.options.tools else plain) for one in conversations]

    def render_messages(
        self, conversations: Sequence[Conversation], *, allow_special_tokens: bool = False
    ) -> list[RenderedMessages | ChatTemplateError]:
        """`render_all`. Texts of special tokens in messages, tools and variables stay text, unless they are allowed."""
        if allow_special_tokens:
            rendered = zip(self.render_all(conversations), conversations, strict=True)
            return [
                text if isinstance(text, ChatTemplateError) else RenderedMessages(text, {}, given.open_text)
                for text, given in rendered
            ]
        return self._literals.render(conversations, self.render_all)

    def encode_messages(
        self, prompts: Sequence[RenderedMessages], *, allow_special_tokens: bool = False
    ) -> list[list[int]]:
        """Tokens of many rendered messages, on all cores; see `render_messages`."""
        encoded = self.encode_batch([prompt.text for prompt in prompts], is_rendered=True)
        if allow_special_tokens:
            return encoded
        return [
            token_ids if self._literals.is_as_usual(prompt, token_ids) else self._literals.encode(prompt)
            for prompt, token_ids in zip(prompts, encoded, strict=True)
        ]

    def encode_batch(self, texts: Sequence[str], *, is_rendered: bool) -> list[list[int]]:
        """Tokens of many texts, on all cores.

        Plain prompts get the special tokens that the model expects around them. `is_rendered`: the texts come from the
        chat template, which has written them.
        """
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=not is_rendered)
        return [list(encoding.ids) for encoding in encodings]

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a very long text certainly has more tokens than this, found out without encoding all of it.

        Its beginning is encoded, then eight times as much and so on, until there are far more tokens than that.
        """
        size = _CHARACTERS_PER_TOKEN * max_tokens
        while size < len(text):
            encoded = self._backend.encode_batch_fast([text[:size]], add_special_tokens=False)[0]
            if len(encoded.ids) > 2 * max_tokens + _SPARE_TOKENS:
                return True
            size *= 8
        return False

    def decode(self, token_ids: Sequence[int], keep: Collection[int] = ()) -> str:
        """Text of generated tokens, without special tokens other than those to `keep`."""
        if not keep:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=True))
        kept = [i for i in token_ids if i in keep or i not in self._special_ids]
        return str(self._backend.decode(kept, skip_special_tokens=False))

    def special_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Of these texts, those that are special tokens: `decode` leaves them out."""
        ids = ((self._backend.token_to_id(text), text) for text in texts)
        return tuple(i for i, text in ids if i is not None and text in self._special_texts)

    def special_tokens_in(self, texts: Sequence[str]) -> frozenset[int]:
        """Special tokens that are parts of these texts: `decode` must keep them for the texts to be found."""
        found = (i for special, i in self._special_texts.items() if special and any(special in text for text in texts))
        return frozenset(found)


class Tokenizers:
    """The tokenizers of an engine: the base's, and those of adapters that ship one.

    `own_folder(adapter_id)`: the adapter's folder if it ships a tokenizer. `eos_token_ids`: the model's.
    """

    def __init__(
        self, model_folder: Path, own_folder: Callable[[str | None], Path | None], eos_token_ids: tuple[int, ...]
    ) -> None:
        base = Tokenizer.from_folder(model_folder)
        self._eos_token_ids = tuple(sorted({*eos_token_ids, *base.eos_token_ids}))
        self._own_folder = own_folder
        self._read = lru_cache(None)(Tokenizer.from_folder)
        self._of_adapter: dict[str | None, tuple[Path, Tokenizer]] = {None: (model_folder, base)}

    def of(self, adapter_id: str | None) -> Tokenizer:
        """The tokenizer of an adapter's rows."""
        return self._find(adapter_id)[1]

    def folder_of(self, adapter_id: str | None) -> Path:
        """Where that tokenizer lies."""
        return self._find(adapter_id)[0]

    def ends(self, request: Request) -> tuple[int, ...]:
        """Tokens that end a row."""
        sampling, tokenizer = request.sampling, self.of(request.adapter_id)
        asked = (*sampling.stop_token_ids, *(tokenizer.special_token_ids(sampling.stop) if sampling.stop else ()))
        return asked if sampling.ignore_eos else (*self._eos_token_ids, *tokenizer.eos_token_ids, *asked)

    def stop_tokens(self, request: Request) -> tuple[int, ...]:
        """All that could end a row, and the base's own ends."""
        sampling, tokenizer = request.sampling, self.of(request.adapter_id)
        special = tokenizer.special_token_ids(sampling.stop)
        return tuple({*self._eos_token_ids, *tokenizer.eos_token_ids, *sampling.stop_token_ids, *special})

    def _find(self, adapter_id: str | None) -> tuple[Path, Tokenizer]:
        if adapter_id not in self._of_adapter:
            folder = self._own_folder(adapter_id)
            self._of_adapter[adapter_id] = self._of_adapter[None] if folder is None else (folder, self._read(folder))
        return self._of_adapter[adapter_id]


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
        """The text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        text = self._text_of_pending()
        is_incomplete = text.endswith(_REPLACEMENT)
        return "" if is_incomplete and len(self._pending) < _MAX_PENDING_TOKENS else self._release(text)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._release(self._text_of_pending())

    def _text_of_pending(self) -> str:
        return self._tokenizer.decode(self._context + self._pending, self._keep)[self._num_context_chars :]

    def _release(self, text: str) -> str:
        # Tokens without text (special ones) say nothing about the next one; what stood before them does.
        self._context = self._pending if text else (self._context + self._pending)[-_MAX_CONTEXT_TOKENS:]
        self._num_context_chars = len(self._tokenizer.decode(self._context, self._keep))
        self._pending = []
        return text


def _no_template() -> ChatTemplateError:
    return ChatTemplateError("this model has no chat template; give a prompt instead of messages")


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_backend(path: Path) -> TokenizerFile:
    if not path.exists():
        raise ModelFilesError(
            f"{path}: missing. A model folder needs it; transformers makes one with "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
        )
    try:
        backend = TokenizerFile.from_str(read_regular(path, MAX_TOKENIZER_BYTES).decode("utf-8"))
    except STOPS:
        raise
    except BaseException as error:
        # The library raises plain `Exception` for whatever it cannot parse, and `PanicException`, which is none.
        raise ModelFilesError(f"{path}: not a tokenizer ({shown_name(str(error))}). Fetch the model again.") from None
    backend.no_truncation()
    backend.no_padding()
    problem = expansion_problem(backend)
    if problem is not None:
        raise ModelFilesError(f"{path}: {problem}. Repair it, or take another tokenizer.")
    return backend


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; each may be written as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and name not in found:
                found[name] = text
    return found


def _mark_special(backend: TokenizerFile, special: Mapping[str, str]) -> None:
    """Named special tokens that the file lists as ordinary vocabulary are special all the same."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = [text for text in special.values() if text not in added and backend.token_to_id(text) is not None]
    if plain:
        backend.add_special_tokens(list(dict.fromkeys(plain)))


def _template_sources(folder: Path) -> dict[str, str]:
    """Name -> text of the chat templates that a folder has and that are used: the default one, and one for tools."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return {_DEFAULT: read_regular(path, 4 * MAX_TEMPLATE_CHARACTERS).decode("utf-8")}
        except OSError as error:
            raise ModelFilesError(f"{path}: cannot be read ({error.strerror}). Fetch the model again.") from None
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{path}: not UTF-8 text ({error}). Fetch the model again.") from None
    named = _read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(named, list):
        entries = [entry for entry in named if isinstance(entry, Mapping)]
        found = {
            name: next((entry.get("template") for entry in entries if entry.get("name") == name), None)
            for name in (_DEFAULT, _FOR_TOOLS)
        }
    else:
        found = {_DEFAULT: named}
    for name, source in found.items():
        if source is not None and not isinstance(source, str):
            raise ModelFilesError(
                f"{folder / 'tokenizer_config.json'} chat_template: expected a string, or a list of "
                f"{{name, template}} with one named 'default', found {type(source).__name__} ({name})."
            )
    if found[_DEFAULT] is None:
        return {}
    return {name: source for name, source in found.items() if source is not None}
