"""Refuses tokenizers that turn short texts into very long ones, or few tokens into very long texts.

A tokenizer's file is a stranger's: a normalizer may replace one letter by megabytes, and a chain of them multiplies.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from tokenizers import Tokenizer as TokenizerFile

_MAX_FACTOR = 1024  # Unicode's own normal forms make at most 18 characters of one
_MAX_TOKEN_CHARACTERS = 16_384
_MAX_TOKENS_AROUND = 256


def expansion_problem(backend: TokenizerFile) -> str | None:
    """Why a tokenizer makes much of little, as a clause; None when it does not."""
    for part, step in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        factor = 1 if step is None else _factor(json.loads(step.__getstate__()))
        if factor > _MAX_FACTOR:
            return f"its {part} makes {factor} characters of one, expected at most {_MAX_FACTOR}"
    around = backend.num_special_tokens_to_add(False) if backend.post_processor is not None else 0
    if around > _MAX_TOKENS_AROUND:
        return f"it puts {around} tokens around a prompt, expected at most {_MAX_TOKENS_AROUND}"
    return None


def long_token_problem(backend: TokenizerFile) -> str | None:
    """Why a tokenizer has too long a token, as a clause; None when it has none. Looking at all tokens takes a large
    tokenizer 0.1 s.
    """
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    if longest > _MAX_TOKEN_CHARACTERS:
        return f"it has a token of {longest} characters, expected at most {_MAX_TOKEN_CHARACTERS}"
    return None


def _factor(step: Any) -> int:
    """The most characters that a normalizer or decoder makes of one."""
    factor = 1
    if not isinstance(step, dict):
        return factor
    for name in ("normalizers", "decoders"):
        for inner in step.get(name) or ():
            factor *= _factor(inner)
    pattern = step.get("pattern")
    replaced = len(pattern["String"]) if isinstance(pattern, dict) and pattern.get("String") else 1
    for name in ("content", "prepend", "replacement", "prefix", "suffix"):
        if isinstance(step.get(name), str):
            factor = max(factor, -(-len(step[name]) // replaced))
    charsmap = step.get("precompiled_charsmap")
    return max(factor, _longest_replacement(charsmap)) if isinstance(charsmap, str) else factor


def _longest_replacement(charsmap: str) -> int:
    """The longest text in SentencePiece's precompiled map, which holds the size of a trie, the trie, and texts that end
    with a zero byte.
    """
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))
