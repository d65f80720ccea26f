"""How much of each prompt the rows of a chunk have in common: what a prefix cache need not compute again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TOKEN_BYTES = 4


def shared_tokens(adapters: Sequence[str | None], prompts: Sequence[ArrayLike]) -> NDArray[np.int32]:
    """Tokens at the beginning of each prompt that a row of the same adapter has computed, int32 `[num_rows]`.

    Rows are compared with the one before in the order of their tokens. Summed up that is what a radix tree of all
    prompts saves, however rows are ordered later: each beginning is counted for all rows but one.
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
