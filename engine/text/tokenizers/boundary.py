"""Encodes texts behind prompts, and decodes them there: the tokens of a text depend on what stands before it.

Tokenizers that put a blank before a text (SentencePiece, Metaspace) encode a text by itself as a word of its own. In
its place it may go on with a word, or begin with the blank that it has. The tokens of a text are those of prompt and
text together less those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .tokenizer import Tokenizer

# Tokens at the end of a prompt on which those of a text behind it may depend.
_CONTEXT_TOKENS = 12
# Text before texts whose prompt cannot be encoded again: no token goes on behind it.
_ANCHOR = "\n"
_MOST_KEPT = 32


def texts_behind(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], texts: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """Tokens of each text in its place behind a prompt of tokens. For a text that begins in the middle of a token they
    are those behind a line break.
    """
    return _texts_behind(tokenizer, _tail(tokenizer, prompt_token_ids), texts)[0]


def first_merged(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], texts: tuple[str, ...]) -> int | None:
    """Number of the first text that begins in the middle of a token behind a prompt of tokens; None: none does."""
    return _texts_behind(tokenizer, _tail(tokenizer, prompt_token_ids), texts)[1]


def _tail(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The last tokens of a prompt, on which those of a text behind it may depend. Text before a special token does not
    change the tokens behind it: prompts of a chat template end alike.
    """
    tail = tuple(prompt_token_ids[-_CONTEXT_TOKENS:])
    start = max((place for place, token in enumerate(tail) if token in tokenizer.special_ids), default=0)
    return tail[start:]


def split_at_prompt(prompt: Sequence[int], whole: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """The tokens of prompt and text together, split into those of the prompt and those of the text. Where the last
    tokens of the prompt and the first of the text have become others, these belong to the text.
    """
    num_prompt = next(
        (place for place, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other),
        min(len(prompt), len(whole)),
    )
    return list(whole[:num_prompt]), tuple(whole[num_prompt:])


def text_behind(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of tokens behind a prompt, with the blank that it begins with."""
    tail = list(prompt_token_ids[-_CONTEXT_TOKENS:])
    before, both = tokenizer.decode(tail), tokenizer.decode([*tail, *token_ids])
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(token_ids)


def given_text(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text that was given, which has these tokens behind a prompt. Some tokenizers put a blank of their own between
    a special token and a text; where the text has the same tokens with that blank, it is kept.
    """
    found = text_behind(tokenizer, prompt_token_ids, token_ids)
    if found.startswith(" ") and prompt_token_ids and prompt_token_ids[-1] in tokenizer.special_ids:
        both = (found, found[1:])
        tokens = texts_behind(tokenizer, prompt_token_ids, both)
        return next((text for text, of_it in zip(both, tokens, strict=True) if of_it == tuple(token_ids)), found)
    return found


@lru_cache(_MOST_KEPT)
def _texts_behind(
    tokenizer: Tokenizer, tail: tuple[int, ...], texts: tuple[str, ...]
) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """Results of `texts_behind` and of `first_merged`, found together."""
    tokens, merged = _behind(tokenizer, *_context(tokenizer, tail), texts)
    if merged:
        alone, _ = _behind(tokenizer, *_anchor(tokenizer), texts)
        tokens = [alone[number] if number in merged else found for number, found in enumerate(tokens)]
    return tuple(map(tuple, tokens)), merged[0] if merged else None


def _behind(
    tokenizer: Tokenizer, context: str, context_tokens: list[int], texts: tuple[str, ...]
) -> tuple[list[list[int]], list[int]]:
    """Tokens of each text behind a text, and the numbers of those that begin in the middle of a token."""
    whole = tokenizer.encode_batch([context + text for text in texts], is_rendered=True)
    merged = [n for n, found in enumerate(whole) if found[: len(context_tokens)] != context_tokens]
    return [found[len(context_tokens) :] for found in whole], merged


def _context(tokenizer: Tokenizer, tail: tuple[int, ...]) -> tuple[str, list[int]]:
    """A text whose tokens are the last ones of a prompt, as many as can be encoded again, and its tokens."""
    pieces = [list(tail[start:]) for start in range(len(tail))]
    texts = list(map(tokenizer.text_of, pieces))
    for text, piece, found in zip(texts, pieces, tokenizer.encode_batch(texts, is_rendered=True), strict=True):
        if found == piece:
            return text, piece
    # tokens in the middle of a word, or a blank of which a decoder makes nothing at the beginning
    _, before = _anchor(tokenizer)
    anchored = [tokenizer.text_of([*before, *piece]) for piece in pieces]
    for text, piece, found in zip(anchored, pieces, tokenizer.encode_batch(anchored, is_rendered=True), strict=True):
        if found[-len(piece) :] == piece:
            return text, found
    return _anchor(tokenizer)


def _anchor(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    return _ANCHOR, tokenizer.encode_batch([_ANCHOR], is_rendered=True)[0]
