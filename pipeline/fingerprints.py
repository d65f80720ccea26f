"""Hashes of a row: who it is, what it asks, and how its prompt begins. The same on every machine and day."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

import numpy as np

from ..engine.request import SamplingParams

FINGERPRINT_BYTES = 16
# Prompts are compared by as many leading tokens as fit: short ones still meet, long ones do not split too early.
_PREFIX_TOKENS = (64, 32, 16)


def row_fingerprint(row_id: str | int | None, tokens: Sequence[int], sampling: SamplingParams) -> bytes:
    """16 bytes over id, prompt tokens and all sampling parameters. The adapter's and the base's content are
    compared beside it by whoever reuses an answer.
    """
    asked = json.dumps([_typed(row_id), _canonical(sampling)]).encode()
    digest = hashlib.blake2b(len(asked).to_bytes(8, "little") + asked, digest_size=FINGERPRINT_BYTES)
    digest.update(_token_bytes(tokens))
    return digest.digest()


def id_hash(row_id: str | int | None) -> int:
    """64 bits to find rows of equal ids; 0 is kept for rows without one. Equal hashes need a second look."""
    return 0 if row_id is None else _hash64(json.dumps(_typed(row_id)).encode())


def prefix_hash(tokens: Sequence[int]) -> int:
    """64 bits over the first 64 (or 32, or 16) tokens; 0 for prompts shorter than that."""
    for count in _PREFIX_TOKENS:
        if len(tokens) >= count:
            return _hash64(_token_bytes(tokens[:count]))
    return 0


@lru_cache(maxsize=4096)
def _canonical(sampling: SamplingParams) -> str:
    """Most rows of a job share a few combinations."""
    return json.dumps(asdict(sampling), sort_keys=True)


def _typed(row_id: str | int | None) -> list[str | int | None]:
    """The id with its type, so that 1 and "1" differ."""
    return [type(row_id).__name__, row_id]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def _hash64(data: bytes) -> int:
    """Never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1
