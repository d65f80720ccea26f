"""Hashes of a row: of its id, of all that its answer depends on, and of the prompt's beginning. Equal on every machine.

`shared_tokens` counts how much of each prompt the rows of a chunk have in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...engine.request import FIRST_OPTIONS, SAMPLING_OPTIONS, SamplingParams

FINGERPRINT_BYTES = 16
#: Leading bytes of a fingerprint that are the key of the row's random numbers.
STREAM_BYTES = 8
_TOKEN_BYTES = 4
# Numbers of leading tokens by which prompts are compared, the first that a prompt has: short prompts still meet, long
# ones do not split too early.
_PREFIX_TOKENS = (64, 32, 16)
# Options beside the constraint and `max_tokens` by which answers end earlier or later.
_ENDING_OPTIONS = (
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "allowed_token_ids", "reasoning_markers", "tool_call_parser",
)  # fmt: skip


def row_fingerprint(
    row_id: str | int | None, tokens: Sequence[int], sampling: SamplingParams, sample: int = 0
) -> bytes:
    """16 bytes over id, prompt tokens, sampling parameters and number of the row's completion (`sample`). Contents of
    adapter and base model are no part of it; they are compared separately when an answer is reused.
    """
    asked = json.dumps([_typed(row_id), _canonical(sampling), *([sample] if sample else [])]).encode()
    digest = hashlib.blake2b(len(asked).to_bytes(8, "little") + asked, digest_size=FINGERPRINT_BYTES)
    digest.update(_token_bytes(tokens))
    return digest.digest()


def staged_fingerprint(first: bytes, stages: str, given: Sequence[Any]) -> bytes:
    """16 bytes over all that the results of a row with several stages depend on, contents of adapters and base model
    left out. `first`: `row_fingerprint` of its first request. `stages`: the job's stages. `given`: values of all
    columns that the stages read.
    """
    asked = json.dumps([stages, list(given)], default=str).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(first + asked, digest_size=FINGERPRINT_BYTES).digest()


def id_hash(row_id: str | int | None) -> int:
    """64-bit hash to find rows of equal ids; 0 for rows without an id. Ids with equal hashes must be compared."""
    return 0 if row_id is None else _hash64(json.dumps(_typed(row_id)).encode())


def prefix_hash(tokens: Sequence[int]) -> int:
    """64-bit hash of the first 64 tokens, of shorter prompts of 32 or 16; 0 for prompts of fewer than 16 tokens."""
    for count in _PREFIX_TOKENS:
        if len(tokens) >= count:
            return _hash64(_token_bytes(tokens[:count]))
    return 0


@lru_cache(maxsize=4096)
def task_hash(sampling: SamplingParams, asked: str = "", templates: tuple[tuple[str, str], ...] = ()) -> int:
    """64-bit hash, never 0, that is equal for rows of one task: answers of like lengths are expected of them, if they
    have the same adapter. Lengths of earlier jobs are found by it.

    It holds the constraint and the other options that end an answer, and `asked`: system messages and tools of the row.
    `templates`: role and template of each message that is made of columns. `max_tokens` is left out: lengths are known
    as a distribution, of which it cuts the end.
    """
    ending = [getattr(sampling, name) for name in _ENDING_OPTIONS]
    return _hash64(json.dumps([sampling.constraint, ending, asked, templates]).encode("utf-8", "backslashreplace"))


@lru_cache(maxsize=4096)
def _canonical(sampling: SamplingParams) -> str:
    """The sampling as JSON: options of the first version, and later ones that are not at their defaults. New options
    thus leave the fingerprints of rows that do not use them unchanged.

    Cached: most rows of a job share a few combinations.
    """
    values = asdict(sampling)
    asked = {n: v for n, v in values.items() if n in FIRST_OPTIONS or v != SAMPLING_OPTIONS[n].default}
    return json.dumps(asked, sort_keys=True)


def _typed(row_id: str | int | None) -> list[str | int | None]:
    """The id with its type, so that 1 and "1" differ."""
    return [type(row_id).__name__, row_id]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def _hash64(data: bytes) -> int:
    """64-bit hash of bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def shared_tokens(adapters: Sequence[str | None], prompts: Sequence[ArrayLike]) -> NDArray[np.int32]:
    """Tokens at the beginning of each prompt that another row of the same adapter has computed, int32 `[num_rows]`.

    Each row is compared with the row before it in the order of their tokens. The sum over all rows is what a radix tree
    of all prompts saves, in whatever order rows run: each beginning is counted for all rows but one.
    """
    # Big-endian, so that bytes sort as tokens do.
    keys = [
        (adapter or "", np.asarray(prompt, ">u4").tobytes()) for adapter, prompt in zip(adapters, prompts, strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(keys), np.int32)
    for before, row in pairwise(order):
        if keys[before][0] == keys[row][0]:
            shared[row] = _common_bytes(keys[before][1], keys[row][1]) // _TOKEN_BYTES
    return shared


def _common_bytes(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(np.argmax(differs)) if differs.any() else size
