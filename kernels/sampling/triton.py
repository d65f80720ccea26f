"""Sampling on a GPU, without sorting.

A cut or a draw asks for the same thing: the largest logit t at which the mass of all logits >= t reaches a goal.
Logits are ordered like their bits, so t is found digit by digit: 8 passes, each testing 16 values of the next 4 bits at
once. Top-k, top-p and the draw are one such search each. Over a whole row of 128256 logits that would be 33e6 additions
in fp64. But what stays after the cuts is nearly always among some hundred logits next to the largest: one pass over the
row finds how far below the largest they begin (one of four distances) and whether that is enough for the cuts, the next
one copies them, and the searches look at the copy. Where they are too many (a flat row) the searches look at the row.

One program per row, the row stays in L2 (250 KiB; 256 rows would be 63 MiB, a little more than its 60). Rows that are
cut are read three times, others too. Not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import SamplingRows

_BLOCK = 1024
# Candidates of a row: those within so many times the temperature of the largest logit, 4, 8, 16 or 32.
_CAPACITY = 4096
_DISTANCES = 4


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
def _copy_candidates(
    row, vocab_size, temperature, largest, top_k, top_p, values_at, ids_at,
    CAPACITY: tl.constexpr, DISTANCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the logits next to the largest in order of token ids: as few as hold what the cuts leave.

    Returns how many, and the mass of all others; 0 where they are more than CAPACITY.
    """
    steps = tl.arange(0, DISTANCES)
    bounds = largest - temperature * 4.0 * tl.exp2(steps.to(tl.float32))
    counts = tl.zeros((DISTANCES,), dtype=tl.int32)
    masses = tl.zeros((DISTANCES,), dtype=tl.float64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids, _keys, weights = _block(row, start, vocab_size, temperature, largest, BLOCK)
        value = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_near = (value[:, None] >= bounds[None, :]) & (ids < vocab_size)[:, None]
        counts += tl.sum(tl.where(is_near, 1, 0), axis=0)
        masses += tl.sum(tl.where(is_near, weights[:, None], 0.0), axis=0)
        total += weights
    whole = tl.sum(total, axis=0)
    # sums of other orders may differ in their last bits
    holds_cut = tl.where(top_k > 0, counts >= top_k, masses >= top_p * whole * (1.0 + 1e-12))
    step = tl.min(tl.where(holds_cut & (counts <= CAPACITY), steps, DISTANCES), axis=0)
    count = step * 0
    below = whole * 0.0
    if step < DISTANCES:
        bound = tl.max(tl.where(steps == step, bounds, float("-inf")), axis=0)
        below = whole - tl.sum(tl.where(steps == step, masses, 0.0), axis=0)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            is_near = (value >= bound) & (ids < vocab_size)
            near = tl.where(is_near, 1, 0)
            places = count + tl.cumsum(near, axis=0) - 1
            tl.store(values_at + places, value, mask=is_near)
            tl.store(ids_at + places, ids, mask=is_near)
            count += tl.sum(near, axis=0)
        # other threads of this program read what these have stored
        tl.debug_barrier()
    return count, below


@triton.jit
def _draw_cut(row, num_logits, below, temperature, largest, top_k, top_p, u, BLOCK: tl.constexpr):
    """The place of a logit in order of falling logits, after top-k and top-p. `below`: mass of logits that are not in
    the row, and smaller than all in it."""
    cut = top_p.to(tl.int64) * 0
    total, above, equal, weight = _around(row, num_logits, temperature, largest, cut - 1, BLOCK)
    kept = above * 0 + num_logits  # ties at the cut that stay: all
    if top_k == 0:
        total += below
    if (top_k > 0) & (top_k < num_logits):
        cut = _search(row, num_logits, temperature, largest, top_k.to(tl.float64) - 0.5, True, True, BLOCK)
        mass, above, equal, weight = _around(row, num_logits, temperature, largest, cut, BLOCK)
        kept = top_k - above
        total = mass + kept.to(tl.float64) * weight
    if top_p < 1.0:
        goal = top_p * total
        at = tl.maximum(_search(row, num_logits, temperature, largest, goal, False, False, BLOCK), cut)
        mass, above, equal, weight = _around(row, num_logits, temperature, largest, at, BLOCK)
        fitting = tl.maximum(tl.ceil((goal - mass) / weight), 1.0).to(tl.int32)
        kept = tl.minimum(fitting, tl.where(at == cut, tl.minimum(kept, equal), equal))
        total = mass + kept.to(tl.float64) * weight
        cut = at
    target = u * total
    at = tl.maximum(_search(row, num_logits, temperature, largest, target, False, True, BLOCK), cut)
    mass, above, equal, weight = _around(row, num_logits, temperature, largest, at, BLOCK)
    last = tl.where(at == cut, tl.minimum(kept, equal), equal) - 1
    place = tl.minimum(tl.maximum(tl.floor((target - mass) / weight), 0.0).to(tl.int32), last)
    found = num_logits - 1
    passed = place * 0
    for start in range(0, num_logits, BLOCK):
        ids, keys, _weights = _block(row, start, num_logits, temperature, largest, BLOCK)
        ties = tl.where(keys == at, 1, 0)
        is_it = (keys == at) & (passed + tl.cumsum(ties, axis=0) == place + 1)
        found = tl.minimum(found, tl.min(tl.where(is_it, ids, num_logits), axis=0))
        passed += tl.sum(ties, axis=0)
    return found


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
    tokens, logits, stride, vocab_size, temperatures, top_ks, top_ps, seeds, streams, positions, values, ids_of_values,
    CAPACITY: tl.constexpr, DISTANCES: tl.constexpr, BLOCK: tl.constexpr,
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
        # a cut that cuts nothing still asks for the order of falling logits
        if (top_k > 0) | (top_p < 1.0):
            top_k = tl.where(top_k < vocab_size, top_k, 0)
            values_at = values + index.to(tl.int64) * CAPACITY
            ids_at = ids_of_values + index.to(tl.int64) * CAPACITY
            count, below = _copy_candidates(
                row, vocab_size, temperature, largest, top_k, top_p, values_at, ids_at, CAPACITY, DISTANCES, BLOCK
            )
            if count > 0:
                place = _draw_cut(values_at, count, below, temperature, largest, top_k, top_p, u, BLOCK)
                token = tl.load(ids_at + place)
            else:
                token = _draw_cut(row, vocab_size, below, temperature, largest, top_k, top_p, u, BLOCK)
        else:
            token = _draw_any(row, vocab_size, temperature, largest, u, BLOCK)
    tl.store(tokens + index, token.to(tl.int64))


def sample(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """See `sample_tokens`."""
    if len(logits):
        values = torch.empty(len(logits), _CAPACITY, dtype=torch.float32, device=logits.device)
        ids = torch.empty(len(logits), _CAPACITY, dtype=torch.int32, device=logits.device)
        _sample[(len(logits),)](
            tokens, logits, logits.stride(0), logits.shape[1], rows.temperature, rows.top_k, rows.top_p,
            rows.seeds, rows.streams, rows.positions, values, ids,
            CAPACITY=_CAPACITY, DISTANCES=_DISTANCES, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
