"""Names and reads the files of a folder that make up its tokenizer: once, so that their hash is of what is used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..system.untrusted import parse_json, read_regular
from .errors import ModelFilesError

MAX_TOKENIZER_BYTES = 128 << 20  # those of 260,000 tokens have 35 MB
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
#: Vocabularies in older forms, and what transformers needs to read them.
OLDER_VOCABULARIES: Mapping[str, str] = {
    "vocab.json": "byte pairs, with merges.txt",
    "merges.txt": "byte pairs, with vocab.json",
    "tokenizer.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "sentencepiece.bpe.model": "SentencePiece",
    "vocab.txt": "WordPiece",
    "tekken.json": "Mistral's",
    "tiktoken.model": "tiktoken's",
}
#: All files that say something of a tokenizer, in the order in which they are hashed.
NAMES = (
    TOKENIZER,
    "tokenizer.model",
    SETTINGS,
    TEMPLATE,
    SPECIAL_MAP,
    ADDED,
    TOOL_TEMPLATE,
    *(name for name in OLDER_VOCABULARIES if name != "tokenizer.model"),
)


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """The files of one folder, by name."""

    folder: Path
    contents: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: Path, expected_sha256: str = "") -> TokenizerFiles:
        """Read the files that are there. Raises `ModelFilesError` for one that cannot be read, and when they have
        another hash than is expected ("": any).
        """
        contents = {}
        for name in NAMES:
            try:
                if (folder / name).exists():
                    contents[name] = read_regular(folder / name, MAX_TOKENIZER_BYTES)
            except OSError as error:
                raise ModelFilesError(f"{folder / name}: cannot be read ({error.strerror}). Fetch it again.") from None
        files = cls(folder, contents)
        if expected_sha256 and (found := files.sha256) != expected_sha256:
            raise ModelFilesError(
                f"{folder}: its tokenizer holds content {found[:12] or 'none'}, expected {expected_sha256[:12]}: its "
                "files have changed since they were read first."
            )
        return files

    @cached_property
    def sha256(self) -> str:
        """Hash of all of them; empty where there are none."""
        return _sha256(self.contents)

    @property
    def older_vocabularies(self) -> tuple[str, ...]:
        """The vocabularies in older forms."""
        return tuple(name for name in OLDER_VOCABULARIES if name in self.contents)

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is more than settings, added tokens and templates."""
        return TOKENIZER in self.contents or bool(self.older_vocabularies)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of a file; an empty one where it is missing. Raises `ModelFilesError`."""
        try:
            value = parse_json(self.contents.get(name, b"{}").decode("utf-8"))
        except ValueError as error:
            raise ModelFilesError(f"{self.folder / name}: not valid JSON ({error}). Fetch it again.") from None
        if not isinstance(value, dict):
            raise ModelFilesError(f"{self.folder / name}: expected a JSON object, found {type(value).__name__}.")
        return value

    def text(self, name: str) -> str:
        """The text of a file. Raises `ModelFilesError`."""
        try:
            return self.contents[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{self.folder / name}: not UTF-8 text ({error}). Fetch it again.") from None


def tokenizer_sha256(folder: Path) -> str:
    """Hash of the tokenizer and chat templates of a folder; empty when it has none. Raises `ModelFilesError`."""
    return TokenizerFiles.of(folder).sha256


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder has a vocabulary of its own, in whatever form."""
    return any((folder / name).is_file() for name in (TOKENIZER, *OLDER_VOCABULARIES))


def whose_tokenizer(folder: Path) -> str:
    """Whose tokenizer serves an adapter's rows by the files in its folder, as a clause for people; empty where the
    folder has none of its own.
    """
    names = [name for name in NAMES if (folder / name).is_file()]
    has_template = TEMPLATE in names or TOOL_TEMPLATE in names
    if not names:
        return ""
    if TOKENIZER in names:
        return f"its rows are tokenised by its own {TOKENIZER}"
    older = [name for name in names if name in OLDER_VOCABULARIES]
    if older:
        return f"its rows are tokenised by its own {', '.join(older)}"
    what = "its own chat template" if has_template else f"what its own {', '.join(names)} says"
    return f"its rows are tokenised by the base's {TOKENIZER}, with {what}"


def _sha256(contents: Mapping[str, bytes]) -> str:
    if not contents:
        return ""
    digest = hashlib.sha256()
    for name, data in contents.items():
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
