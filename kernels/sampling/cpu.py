"""Chooses tokens on a CPU: one compiled call for all rows, or torch, a row after the other.

Both do what `sample_tokens` does, to the bit, with the uniform numbers given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function
from .types import NO_TOKEN, Choices, share_of, weights_of

# Candidates of top-p at first, the largest; more are looked at when these fall short, to avoid sorting a vocabulary.
_FIRST_CANDIDATES = 256
# Tokens with the largest logits are looked for within a distance of the largest one: `_NEAR`, then twice as far and so
# on below `_FAR`; only when at most one in `_FEW` is wanted.
_NEAR, _FAR, _FEW = 4.0, 256.0, 8
# Draws without replacement end when less than 2^-_LEAST_LEFT of all weight is left: the weights left have too few bits.
_LEAST_LEFT = 20
_FURTHER_ARGUMENTS = (ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT)
_COMPILED_ARGUMENTS = (ADDRESS, ADDRESS, COUNT, COUNT, *[ADDRESS] * 5, COUNT, ADDRESS, COUNT)


def choose_tokens(logits: Tensor, choices: Choices, allowed: NDArray[np.int32] | None = None) -> list[int]:
    """A token for each choice from `logits` [num_rows, vocab_size]; `NO_TOKEN` when its largest logit is not finite.

    `allowed`: [num_choices, num_words], bit `i % 32` of word `i // 32` is set when token `i` may be chosen (None: all
    may). Bits beyond the vocabulary are ignored.
    """
    is_served = logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("choose_tokens", *_COMPILED_ARGUMENTS) if is_served else None
    if compiled is None:
        return choose_by_torch(logits, choices, allowed)
    tokens = np.empty(len(choices.places), np.int64)
    read = [np.ascontiguousarray(column) for column in choices]
    addresses = [column.ctypes.data for column in read]
    masks = (None, 0) if allowed is None else (allowed.ctypes.data, allowed.shape[1])
    compiled(tokens.ctypes.data, logits.data_ptr(), logits.stride(0), logits.shape[1], *addresses, len(tokens), *masks)
    found: list[int] = tokens.tolist()
    return found


def choose_further_tokens(
    logits: Tensor, choices: Choices, tokens: NDArray[np.int64], uniforms: NDArray[np.float64]
) -> list[Iterable[int]]:
    """Up to `count` further tokens for each choice without cuts, none of them its token in `tokens` [num_choices]: the
    next largest, or draws without replacement by `uniforms` [num_choices, count]. Fewer when too little is left.
    """
    is_served = logits.dtype == torch.float32 and logits.stride(1) == 1
    compiled = native_function("choose_further_tokens", *_FURTHER_ARGUMENTS) if is_served else None
    if compiled is None:
        columns = choices.places.tolist(), choices.temperature.tolist(), tokens.tolist(), uniforms.tolist()
        return [_further_by_torch(logits[place].clone(), *more) for place, *more in zip(*columns, strict=True)]
    num_rows, count = uniforms.shape
    found = np.empty((num_rows, 1 + count), np.int64)
    found[:, 0] = tokens
    read = [np.ascontiguousarray(column) for column in (choices.places, choices.temperature, uniforms)]
    first = found.ctypes.data, count, logits.data_ptr(), logits.stride(0), logits.shape[1]
    compiled(*first, *(column.ctypes.data for column in read), num_rows)
    return [[token for token in row if token != NO_TOKEN] for row in found[:, 1:].tolist()]


def _further_by_torch(logits: Tensor, temperature: float, token: int, uniforms: list[float]) -> Iterator[int]:
    """Yields the further tokens of one row; `logits` [vocab_size] are overwritten."""
    weights = weights_of(logits, float(logits.max()), temperature)
    least = int(weights.sum()) >> _LEAST_LEFT
    for u in uniforms:
        logits[token] = -torch.inf
        weights[token] = 0
        if temperature > 0:
            token = _pick(weights, u) if int(weights.sum()) > least else NO_TOKEN
        else:
            token = int(logits.argmax()) if logits.max() > -torch.inf else NO_TOKEN
        if token == NO_TOKEN:
            return
        yield token


def choose_by_torch(logits: Tensor, choices: Choices, allowed: NDArray[np.int32] | None = None) -> list[int]:
    """`choose_tokens` for every dtype and processor."""
    if allowed is not None:
        logits = logits[torch.from_numpy(choices.places)]
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
        choices = choices._replace(places=np.arange(len(logits)))
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
        # a search among the tokens near the largest takes a tenth of the time
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
    """One token drawn from `logits` [vocab_size], whose largest is `largest`."""
    vocab_size = logits.numel()
    if top_k == 0 and top_p >= 1.0:
        return _pick(weights_of(logits, largest, temperature), u)
    total = None if top_k else int(weights_of(logits, largest, temperature).sum())
    width = min(top_k or _FIRST_CANDIDATES, vocab_size)
    while True:
        ids = largest_tokens(logits, width)
        candidates = weights_of(logits[ids], largest, temperature)
        reached = candidates.cumsum(-1)
        # top-p is a share of the weight that top-k leaves
        goal = share_of(int(reached[-1]) if total is None else total, top_p)
        num_kept = max(1, int((reached - candidates < goal).sum())) if top_p < 1 else width
        if top_k or num_kept < width or width == vocab_size:
            kept, order = ids[:num_kept].sort()
            return int(kept[_pick(candidates[order], u)])
        width = min(width * 8, vocab_size)


def _pick(weights: Tensor, u: float) -> int:
    """Index at which the running sum of `weights` first exceeds `u` times its end."""
    reached = weights.cumsum(-1)
    total = int(reached[-1])
    target = torch.tensor([min(share_of(total, u), total - 1)])
    return int(torch.searchsorted(reached, target, right=True)[0])
