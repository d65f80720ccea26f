"""Chooses tokens on a CPU: one compiled call for all rows, or torch, a row after the other.

Both do what `sample_tokens` does, with the uniform numbers given. They differ in the rounding of sums of weights alone,
fp64 in both.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .types import NO_TOKEN, Choices

# Sorting a whole vocabulary is avoided: top-p looks at the largest candidates first, and widens when they fall short.
_FIRST_CANDIDATES = 256
# The largest of many are looked for within this distance of the largest, then twice as far and so on.
_NEAR, _FAR, _FEW = 4.0, 256.0, 8
_COMPILED_ARGUMENTS = (ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, COUNT)


def choose_tokens(logits: Tensor, choices: Choices) -> list[int]:
    """A token for each choice from `logits` [num_rows, vocab_size]; `NO_TOKEN` where its largest is no finite
    number.
    """
    is_served = logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("choose_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        return choose_by_torch(logits, choices)
    tokens = np.empty(len(choices.places), np.int64)
    read = [np.ascontiguousarray(column) for column in choices]
    addresses = [column.ctypes.data for column in read]
    compiled(tokens.ctypes.data, logits.data_ptr(), logits.stride(0), logits.shape[1], *addresses, len(tokens))
    found: list[int] = tokens.tolist()
    return found


def choose_by_torch(logits: Tensor, choices: Choices) -> list[int]:
    """`choose_tokens` for every dtype and processor."""
    largest, choice = logits[torch.from_numpy(choices.places)].max(-1)  # NaN counts as largest
    tokens: list[int] = torch.where(largest.isfinite(), choice, NO_TOKEN).tolist()
    columns = (column.tolist() for column in choices)
    for i, (place, temperature, top_k, top_p, u) in enumerate(zip(*columns, strict=True)):
        if temperature > 0 and tokens[i] != NO_TOKEN:
            tokens[i] = _draw(logits[place], float(largest[i]), temperature, top_k, top_p, u)
    return tokens


def largest_tokens(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of `logits` [vocab_size], in falling order, equals in order of their ids."""
    if count * _FEW < len(logits):
        # looked for among those near the largest: a tenth of the time
        largest, distance = float(logits.max()), _NEAR
        while distance < _FAR:
            near = (logits >= largest - distance).nonzero()[:, 0]
            if len(near) >= count:
                return near[logits[near].argsort(descending=True, stable=True)[:count]]
            distance *= 2
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    return ids[logits[ids].argsort(descending=True, stable=True)[:count]]


def _draw(logits: Tensor, largest: float, temperature: float, top_k: int, top_p: float, u: float) -> int:
    """One token from `logits` [vocab_size], of which `largest` is the largest."""
    vocab_size = logits.numel()

    def weights_of(values: Tensor) -> Tensor:
        # distances from the largest: no temperature is too small for them
        return values.double().sub_(largest).div_(temperature).exp_()

    if top_k == 0 and top_p >= 1.0:
        return _pick(weights_of(logits).cumsum(-1), u)
    # the last running sum, not the sum: that rounds by the number of threads
    total = None if top_k else weights_of(logits).cumsum(-1)[-1]
    width = min(top_k or _FIRST_CANDIDATES, vocab_size)
    while True:
        ids = largest_tokens(logits, width)
        candidates = weights_of(logits[ids])
        reached = candidates.cumsum(-1)
        # top-p is a share of what top-k leaves
        goal = top_p * (reached[-1] if total is None else total)
        num_kept = max(1, int((reached - candidates < goal).sum()))
        if top_k or num_kept < width or width == vocab_size:
            return int(ids[_pick(reached[:num_kept], u)])
        width = min(width * 8, vocab_size)


def _pick(cumulative: Tensor, u: float) -> int:
    """Index at which the running sum (fp64) first exceeds `u` times its end."""
    index = int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True)[0])
    return min(index, cumulative.numel() - 1)
