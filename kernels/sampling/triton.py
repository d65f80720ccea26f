"""Sampling on a GPU, without sorting.

A cut or a draw asks for the same thing: the largest logit t at which the mass of all logits >= t reaches a goal.
Logits are ordered like their bits, so t is found digit by digit: 8 passes over the row, each testing 16 values of
the next 4 bits at once. Top-k, top-p and the draw are one such search each.

One program per row, the row stays in L2 (128256 logits of 2 bytes: 250 KiB; 256 rows would be 63 MiB, a little more
than its 60). Greedy rows read it once: 256 rows are 14 us at 4.8 TB/s. A draw with both cuts reads it 30 times and
adds 16 fp64 numbers per logit and pass for two of the three searches: 2 x 8 x 16 x 128256 = 33e6 adds per row, at 64
a clock on a multiprocessor 0.28 ms, and two rounds of it for 256 rows on 132 of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .types import SamplingRows

_BLOCK = 1024


@triton.jit
def _mixed(state, key):
    x = (state ^ key) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, stream, position):
    """See `reference.uniform`."""
    state = _mixed(seed ^ seed, seed)
    state = _mixed(state, stream)
    state = _mixed(state, position)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _block(row, start, vocab_size, temperature, largest, BLOCK: tl.constexpr):
    """Token ids, keys that are ordered like the logits (from 0; -1 behind the row's end) and weights."""
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    # adding 0 turns -0 into 0, which is its equal and must have its key
    value = tl.load(row + ids, mask=inside, other=0.0).to(tl.float32) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    # distances from the largest: quotients of the logits themselves overflow at small temperatures
    weights = tl.where(inside, tl.exp((value - largest) / temperature), 0.0).to(tl.float64)
    return ids, tl.where(inside, ordered, -1), weights


@triton.jit
def _search(
    row, vocab_size, temperature, largest, goal, IS_COUNT: tl.constexpr, IS_STRICT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest key whose mass of keys at or above it reaches `goal` (exceeds it, if strict); 0 if none does."""
    digits = tl.arange(0, 16)
    found = (goal * 0).to(tl.int64)
    for step in range(0, 8):
        shift = 28 - 4 * step
        thresholds = found + (digits.to(tl.int64) << shift)
        mass = tl.zeros((16,), dtype=tl.float64)
        for start in range(0, vocab_size, BLOCK):
            _ids, keys, weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
            if IS_COUNT:
                weights = weights * 0.0 + 1.0
            at_or_above = keys[:, None] >= thresholds[None, :]
            mass += tl.sum(tl.where(at_or_above, weights[:, None], 0.0), axis=0)
        if IS_STRICT:
            is_reached = mass > goal
        else:
            is_reached = mass >= goal
        digit = tl.max(tl.where(is_reached, digits, 0), axis=0)
        found += digit.to(tl.int64) << shift
    return found


@triton.jit
def _around(row, vocab_size, temperature, largest, key, BLOCK: tl.constexpr):
    """Mass above `key`, number of tokens above it and at it, weight of a token at it."""
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    weight = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        _ids, keys, weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
        mass += tl.where(keys > key, weights, 0.0)
        above += tl.where(keys > key, 1, 0)
        equal += tl.where(keys == key, 1, 0)
        weight = tl.maximum(weight, tl.where(keys == key, weights, 0.0))
    return tl.sum(mass, axis=0), tl.sum(above, axis=0), tl.sum(equal, axis=0), tl.max(weight, axis=0)


@triton.jit
def _draw_cut(row, vocab_size, temperature, largest, top_k, top_p, u, BLOCK: tl.constexpr):
    """A token in order of falling logits, after top-k and top-p."""
    cut = top_p.to(tl.int64) * 0
    total, above, equal, weight = _around(row, vocab_size, temperature, largest, cut - 1, BLOCK)
    kept = above * 0 + vocab_size  # ties at the cut that stay: all
    if (top_k > 0) & (top_k < vocab_size):
        cut = _search(row, vocab_size, temperature, largest, top_k.to(tl.float64) - 0.5, True, True, BLOCK)
        mass, above, equal, weight = _around(row, vocab_size, temperature, largest, cut, BLOCK)
        kept = top_k - above
        total = mass + kept.to(tl.float64) * weight
    if top_p < 1.0:
        goal = top_p * total
        at = tl.maximum(_search(row, vocab_size, temperature, largest, goal, False, False, BLOCK), cut)
        mass, above, equal, weight = _around(row, vocab_size, temperature, largest, at, BLOCK)
        fitting = tl.maximum(tl.ceil((goal - mass) / weight), 1.0).to(tl.int32)
        kept = tl.minimum(fitting, tl.where(at == cut, tl.minimum(kept, equal), equal))
        total = mass + kept.to(tl.float64) * weight
        cut = at
    target = u * total
    at = tl.maximum(_search(row, vocab_size, temperature, largest, target, False, True, BLOCK), cut)
    mass, above, equal, weight = _around(row, vocab_size, temperature, largest, at, BLOCK)
    last = tl.where(at == cut, tl.minimum(kept, equal), equal) - 1
    place = tl.minimum(tl.maximum(tl.floor((target - mass) / weight), 0.0).to(tl.int32), last)
    token = vocab_size - 1
    passed = place * 0
    for start in range(0, vocab_size, BLOCK):
        ids, keys, _weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
        ties = tl.where(keys == at, 1, 0)
        is_it = (keys == at) & (passed + tl.cumsum(ties, axis=0) == place + 1)
        token = tl.minimum(token, tl.min(tl.where(is_it, ids, vocab_size), axis=0))
        passed += tl.sum(ties, axis=0)
    return token


@triton.jit
def _draw_any(row, vocab_size, temperature, largest, u, BLOCK: tl.constexpr):
    """A token in order of token ids."""
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        _ids, _keys, weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
        sums += weights
    target = u * tl.sum(sums, axis=0)
    token = vocab_size - 1
    before = target * 0.0
    for start in range(0, vocab_size, BLOCK):
        ids, keys, weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
        exceeds = (before + tl.cumsum(weights, axis=0) > target) & (keys >= 0)
        token = tl.minimum(token, tl.min(tl.where(exceeds, ids, vocab_size), axis=0))
        before += tl.sum(weights, axis=0)
    return token


@triton.jit
def _sample(
    tokens, logits, stride, vocab_size, temperatures, top_ks, top_ps, seeds, streams, positions, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    largest = tl.load(row).to(tl.float32)
    token = index * 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.max(value, axis=0)
        first = tl.min(tl.where(value == best, ids, vocab_size), axis=0)
        # of equals the first: a later block must be larger
        token = tl.where(best > largest, first, token)
        largest = tl.maximum(largest, best)
    temperature = tl.load(temperatures + index)
    if temperature > 0.0:
        seed = tl.load(seeds + index).to(tl.uint64, bitcast=True)
        stream = tl.load(streams + index).to(tl.uint64, bitcast=True)
        u = _uniform(seed, stream, tl.load(positions + index).to(tl.uint64, bitcast=True))
        top_k = tl.load(top_ks + index)
        top_p = tl.load(top_ps + index)
        if (top_k > 0) | (top_p < 1.0):
            token = _draw_cut(row, vocab_size, temperature, largest, top_k, top_p, u, BLOCK)
        else:
            token = _draw_any(row, vocab_size, temperature, largest, u, BLOCK)
    tl.store(tokens + index, token.to(tl.int64))


def sample(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """See `sample_tokens`."""
    if len(logits):
        _sample[(len(logits),)](
            tokens, logits, logits.stride(0), logits.shape[1], rows.temperature, rows.top_k, rows.top_p,
            rows.seeds, rows.streams, rows.positions, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
