"""Rows under a constraint, token by token: which texts may be their whole completion, and what a random model says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.grammar import Grammars
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizers

_MOST_WRITINGS = 48
# Bytes that strings, lists and objects of JSON end with: a random model would seldom choose them.
_CLOSING = (b'"', b"]", b"}", b",", b":")


class MaskedRows:
    """Rows of one model folder's tokenizer. `end`: the token that ends them."""

    def __init__(self, model: Path, end: int = 2) -> None:
        self._tokenizers = Tokenizers(model, lambda adapter_id: None, (end,))
        self.tokenizer = self._tokenizers.of(None)
        self.vocab_size, self._end = self.tokenizer.vocab_size, end
        self._grammars = Grammars(self._tokenizers)
        self._names = map(str, itertools.count())
        [texts] = [self.tokenizer.encode_batch([sign.decode()], is_rendered=True)[0] for sign in _CLOSING[:1]]
        self._closing = np.array(
            [text[:1] in _CLOSING for text in map(self._bytes, range(self.vocab_size))], dtype=np.bool_
        )
        assert self._closing[texts[0]]

    def may_say(self, schema: str, text: str) -> bool:
        """Whether a row of a JSON Schema may have a text as its whole completion: each token is in the row's mask."""
        row = self._row(schema)
        try:
            for token in self.tokenizer.encode_batch([text], is_rendered=True)[0]:
                if not self._mask(row)[token]:
                    return False
                row.token_ids.append(token)
            return self._grammars.is_complete(row) or bool(self._mask(row)[self._end])
        finally:
            self._grammars.forget(row)

    def walk(self, schema: str, random: Random, most_tokens: int) -> str | None:
        """What a model with random logits answers; None where it comes to no end within `most_tokens`, "" where no
        token may come next.
        """
        row, draws = self._row(schema), np.random.default_rng(random.getrandbits(32))
        try:
            while len(row.token_ids) < most_tokens:
                if self._grammars.is_complete(row):
                    break
                mask = self._mask(row)
                if mask[self._end] and (random.random() < 0.5 or mask.sum() == 1):
                    break
                mask[self._end] = False
                if not mask.any():
                    return ""
                closing = mask & self._closing
                # a string that goes on for ever says nothing of its schema
                if closing.any() and random.random() < 0.3:
                    mask = closing
                row.token_ids.append(int(draws.choice(np.flatnonzero(mask))))
            else:
                return None
            return self.tokenizer.decode(row.token_ids)
        finally:
            self._grammars.forget(row)

    def _row(self, schema: str) -> Sequence:
        return Sequence(Request(next(self._names), (1,), None, SamplingParams(json_schema=schema)))

    def _mask(self, row: Sequence) -> np.ndarray:
        bits = self._grammars.allowed([row], self.vocab_size)[0].view(np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(np.bool_)

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.decode([token]).encode()


def writings(instance: Any) -> Iterator[str]:
    """An instance as JSON in several ways: orders of keys, escapes, whole numbers with and without a fraction."""
    shapes = list(itertools.islice(_orders(instance), _MOST_WRITINGS // 2))
    whole = [_whole(shape) for shape in shapes]
    for shape in (*shapes, *(new for old, new in zip(shapes, whole, strict=True) if repr(new) != repr(old))):
        texts = [json.dumps(shape, ensure_ascii=False)]
        if (escaped := json.dumps(shape)) != texts[0]:
            texts.append(escaped)
        yield from (text for text in texts if text.isprintable() or _is_text(text))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*(list(itertools.islice(_orders(value[key]), 6)) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(itertools.islice(_orders(part), 6)) for part in value)))
    else:
        yield value


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
