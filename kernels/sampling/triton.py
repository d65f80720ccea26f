"""Sampling on a GPU, without sorting: a few passes over the logits, each by many programs per row.

Weights are whole numbers, so that parts of a row add up to the same sum in any order. `_find_largest` finds the largest
logit of each split of a row, then `_narrow` sums the weights at or above each of eight bounds. The cut is between two
of the bounds. If more candidates are between these two than fit into a copy, the next `_narrow` sets its bounds between
them. `_copy` copies the candidates, in order of token ids. `_draw`, one program per row, finds the cut among them, adds
up the kept weights of each split, and goes through the split in which the token is. Rows that need none of this end at
once.

Candidates that still do not fit (logits whose density no bounds divide, or top-k of thousands with top-p) are looked
for in the row instead. Not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import is_interpreted, mend_interpreter
from .types import SamplingRows
from .weights import share_of, uniform, whole_weights

# Programs per row: 16 parts of 128,256 logits are 8 blocks of 1,024 in 16 bits. Not tuned. Few in the interpreter,
# where they run one after the other.
_SPLITS = 2 if is_interpreted() else 16
# Bounds of a round, and rounds: worked through for rows of 128,256 normal logits, most cuts are found in one to three
# rounds, those of flat rows in three or four (benchmarks/results/2026-11-26-gpu-sampling.md).
_BOUNDS, _ROUNDS = 8, 4
# Threads of a program, and the bytes of logits that each loads at a time, as many as an instruction can.
_LANES, _LANE_BYTES = 128, 16
# Candidates of a row that are copied: 6 MiB with their ids for 256 rows in 16 bits, which stay in the L2 cache. Not
# tuned.
_CAPACITY = 4096
# Type of logits -> lowest bits of an fp32 number that are equal in all numbers of the type.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _block(LANES: tl.constexpr, PER_LANE: tl.constexpr):
    """Places of a block's logits, [LANES, PER_LANE]: a thread's own are next to each other."""
    return tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]


@triton.jit
def _load(row, ids, end):
    return tl.load(row + ids, mask=ids < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _running(numbers):
    """Running sums of a block of numbers, without each itself, and their total."""
    of_lanes = tl.sum(numbers, axis=1)
    before = tl.cumsum(of_lanes, axis=0) - of_lanes
    return before[:, None] + tl.cumsum(numbers, axis=1) - numbers, tl.sum(of_lanes, axis=0)


@triton.jit
def _find_largest(
    logits, stride, vocab_size, largest, smallest, tokens, split_size,
    SPLITS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """The largest logit of a split, its first token, and the smallest that is finite."""
    index, split = tl.program_id(0), tl.program_id(1)
    row = logits + index.to(tl.int64) * stride
    end = tl.minimum((split + 1) * split_size, vocab_size)
    most = tl.full((LANES, PER_LANE), float("-inf"), tl.float32)
    least = tl.full((LANES, PER_LANE), float("inf"), tl.float32)
    token = tl.zeros((LANES, PER_LANE), dtype=tl.int32)
    for start in range(split * split_size, end, LANES * PER_LANE):
        ids = start + _block(LANES, PER_LANE)
        value = _load(row, ids, end)
        token = tl.where(value > most, ids, token)
        most = tl.where(value > most, value, most)
        least = tl.where((value < least) & (value > float("-inf")), value, least)
    of_split = tl.max(tl.max(most, axis=1), axis=0)
    first = tl.min(tl.min(tl.where(most == of_split, token, vocab_size), axis=1), axis=0)
    place = index * SPLITS + split
    tl.store(largest + place, of_split)
    tl.store(smallest + place, tl.min(tl.min(least, axis=1), axis=0))
    tl.store(tokens + place, tl.where(first < vocab_size, first, 0))


@triton.jit
def _sums(masses, counts, index, round, num_rows, SPLITS: tl.constexpr, BOUNDS: tl.constexpr):
    """Mass and number of a row's logits at or above each bound of a round, both [SPLITS, BOUNDS]."""
    places = tl.arange(0, SPLITS)[:, None] * BOUNDS + tl.arange(0, BOUNDS)[None, :]
    places += (round * num_rows + index) * SPLITS * BOUNDS
    return tl.load(masses + places), tl.load(counts + places)


@triton.jit
def _at(numbers, place, BOUNDS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BOUNDS) == place, numbers, 0), axis=0)


@triton.jit
def _limits(bounds, round, index, num_rows, first, last, BOUNDS: tl.constexpr):
    """Two bounds of a round: the lower and the higher one."""
    places = tl.arange(0, BOUNDS)
    limits = tl.load(bounds + (round * num_rows + index) * BOUNDS + places)
    low = tl.max(tl.where(places == last, limits, float("-inf")), axis=0)
    return low, tl.max(tl.where(places == first, limits, float("-inf")), axis=0)


@triton.jit
def _cuts(masses, counts, top_ks, top_ps, index, num_rows, SPLITS: tl.constexpr, BOUNDS: tl.constexpr):
    """Top-k, 0 where it cuts nothing that has weight; top-p; the mass of a whole row."""
    mass, count = _sums(masses, counts, index, 0, num_rows, SPLITS, BOUNDS)
    # the last bound but one of the first round is below all that has weight
    num_weighted = _at(tl.sum(count, axis=0), BOUNDS - 2, BOUNDS)
    top_k = tl.load(top_ks + index)
    top_k = tl.where(top_k < num_weighted, top_k, 0)
    return top_k, tl.load(top_ps + index), _at(tl.sum(mass, axis=0), BOUNDS - 1, BOUNDS)


@triton.jit
def _bracket(mass, count, top_k, top_p, whole, BOUNDS: tl.constexpr):
    """The places of two bounds: logits at or above the first stay, logits below the second do not. `mass`, `count`: of
    the whole row at or above each bound, [BOUNDS]."""
    places = tl.arange(0, BOUNDS)
    goal = tl.maximum(share_of(whole, top_p), 1)
    is_enough = tl.where(top_k > 0, count >= top_k, mass >= goal)
    last = tl.maximum(tl.min(tl.where(is_enough, places, BOUNDS - 1), axis=0), 1)
    first = last - 1
    if (top_k > 0) & (top_p < 1.0):
        # top-p is a share of the mass that top-k leaves, which is at least the mass above the cut's first bound
        goal = share_of(_at(mass, first, BOUNDS), top_p)
        first = tl.minimum(first, tl.min(tl.where(mass >= goal, places, BOUNDS), axis=0) - 1)
        first = tl.maximum(first, 0)
    return first, last


@triton.jit(do_not_specialize=["round", "num_rows"])
def _narrow(
    logits, stride, vocab_size, temperatures, top_ks, top_ps, largest, smallest, last_rounds, bounds, masses, counts,
    round, num_rows, split_size,
    CAPACITY: tl.constexpr, SPLITS: tl.constexpr, BOUNDS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """Sets the bounds of a round and sums what is at or above them in a split."""
    index, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + index)
    is_asked = temperature > 0.0
    if round > 0:
        # whether the round before was the first to find enough is not known yet
        last_round = tl.load(last_rounds + (round - 1) * num_rows + index)
        is_asked &= last_round == round - 1
        if split == 0:
            tl.store(last_rounds + round * num_rows + index, last_round)
    if is_asked:
        most = tl.max(tl.load(largest + index * SPLITS + tl.arange(0, SPLITS)), axis=0)
        slope = tl.div_rn(temperature * 0.0 + 1.4426950408889634, temperature)
        places = tl.arange(0, BOUNDS)
        bounds_at = bounds + (round * num_rows + index) * BOUNDS + places
        # distances from the largest logit to 2^-1.5, 2^-3, ... 2^-48 of its weight
        limits = most - 0.75 * tl.exp2(places.to(tl.float32)) / slope
        limits = tl.where(places == 0, float("inf"), tl.where(places == BOUNDS - 1, float("-inf"), limits))
        if round > 0:
            top_k, top_p, whole = _cuts(masses, counts, top_ks, top_ps, index, num_rows, SPLITS, BOUNDS)
            mass, count = _sums(masses, counts, index, round - 1, num_rows, SPLITS, BOUNDS)
            count = tl.sum(count, axis=0)
            first, last = _bracket(tl.sum(mass, axis=0), count, top_k, top_p, whole, BOUNDS)
            is_asked = (top_k > 0) | (top_p < 1.0)
            is_asked &= _at(count, last, BOUNDS) - _at(count, first, BOUNDS) > CAPACITY
            low, high = _limits(bounds, round - 1, index, num_rows, first, last, BOUNDS)
            # the cut, or that of top-k, is between this bound and the next
            _low, upper = _limits(bounds, round - 1, index, num_rows, last - 1, last, BOUNDS)
            top = tl.minimum(upper, most)
            bottom = tl.maximum(low, tl.min(tl.load(smallest + index * SPLITS + tl.arange(0, SPLITS)), axis=0))
            limits = top - (top - bottom) * (places.to(tl.float32) / (BOUNDS - 1))
            limits = tl.where(places == 0, high, tl.where(places == BOUNDS - 1, low, limits))
        if is_asked & (split == 0):
            tl.store(bounds_at, limits)
            tl.store(last_rounds + round * num_rows + index, round)
        if is_asked:
            row = logits + index.to(tl.int64) * stride
            each, mass, count = (), (), ()
            for place in tl.static_range(BOUNDS):
                each += (tl.max(tl.where(places == place, limits, float("-inf")), axis=0),)  # type: ignore[assignment]
                mass += (tl.zeros((LANES,), dtype=tl.int64),)
                count += (tl.zeros((LANES,), dtype=tl.int32),)
            end = tl.minimum((split + 1) * split_size, vocab_size)
            for start in range(split * split_size, end, LANES * PER_LANE):
                value = _load(row, start + _block(LANES, PER_LANE), end)
                weights = whole_weights(value, most, slope)
                more_mass, more_count = (), ()
                for place in tl.static_range(BOUNDS):
                    is_above = value >= each[place]
                    more_mass += (mass[place] + tl.sum(tl.where(is_above, weights, 0), axis=1),)  # type: ignore[assignment]
                    more_count += (count[place] + tl.sum(is_above.to(tl.int32), axis=1),)  # type: ignore[assignment]
                mass, count = more_mass, more_count
            base = ((round * num_rows + index) * SPLITS + split) * BOUNDS
            for place in tl.static_range(BOUNDS):
                tl.store(masses + base + place, tl.sum(mass[place], axis=0))
                tl.store(counts + base + place, tl.sum(count[place], axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _copy(
    logits, stride, vocab_size, temperatures, top_ks, top_ps, last_rounds, bounds, masses, counts, values,
    ids_of_values, num_rows, split_size, CAPACITY: tl.constexpr, SPLITS: tl.constexpr, BOUNDS: tl.constexpr,
    ROUNDS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """Copies the candidates of a split."""
    index, split = tl.program_id(0), tl.program_id(1)
    if tl.load(temperatures + index) > 0.0:
        top_k, top_p, whole = _cuts(masses, counts, top_ks, top_ps, index, num_rows, SPLITS, BOUNDS)
        round = tl.load(last_rounds + (ROUNDS - 1) * num_rows + index)
        mass, count = _sums(masses, counts, index, round, num_rows, SPLITS, BOUNDS)
        first, last = _bracket(tl.sum(mass, axis=0), tl.sum(count, axis=0), top_k, top_p, whole, BOUNDS)
        places = tl.arange(0, BOUNDS)
        sign = tl.where(places == last, 1, tl.where(places == first, -1, 0))
        of_splits = tl.sum(count * sign[None, :], axis=1)
        is_asked = ((top_k > 0) | (top_p < 1.0)) & (tl.sum(of_splits, axis=0) <= CAPACITY)
        here = tl.sum(tl.where(tl.arange(0, SPLITS) == split, of_splits, 0), axis=0)
        if is_asked & (here > 0):
            low, high = _limits(bounds, round, index, num_rows, first, last, BOUNDS)
            row = logits + index.to(tl.int64) * stride
            copied = tl.sum(tl.where(tl.arange(0, SPLITS) < split, of_splits, 0), axis=0)
            end = tl.minimum((split + 1) * split_size, vocab_size)
            for start in range(split * split_size, end, LANES * PER_LANE):
                ids = start + _block(LANES, PER_LANE)
                value = _load(row, ids, end)
                is_within = (value >= low) & (value < high)
                before, added = _running(is_within.to(tl.int32))
                to = copied + before
                is_within &= to < CAPACITY
                to = index.to(tl.int64) * CAPACITY + to
                tl.store(values + to, value.to(values.dtype.element_ty), mask=is_within)
                tl.store(ids_of_values + to, ids, mask=is_within)
                copied += added


@triton.jit
def _keys(value, SPARE_BITS: tl.constexpr):
    """Whole numbers that are ordered like the logits."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which is its equal and must have its key
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SPARE_BITS).to(tl.int64)


@triton.jit
def _candidates(source, start, num, low, high, BLOCK: tl.constexpr, SPARE_BITS: tl.constexpr):
    """Values, keys, and whether each is a candidate."""
    value = _load(source, start + tl.arange(0, BLOCK), num)
    return value, _keys(value, SPARE_BITS), (value >= low) & (value < high)


@triton.jit
def _search(
    source, num, low, high, most, slope, goal, IS_COUNT: tl.constexpr, key, last_key, mass, count,
    BLOCK: tl.constexpr, SPARE_BITS: tl.constexpr,
):  # fmt: skip
    """The largest key, from `key` to `last_key`, for which the candidates at or above it reach `goal`; the mass and
    number of these candidates (`mass`, `count` are theirs for `key`); mass and number of the candidates above it."""
    mass_above, count_above = mass * 0, count * 0
    while key < last_key:
        middle = key + (last_key - key + 1) // 2
        some_mass = tl.zeros((BLOCK,), dtype=tl.int64)
        some_count = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(0, num, BLOCK):
            value, keys, is_candidate = _candidates(source, start, num, low, high, BLOCK, SPARE_BITS)
            is_above = is_candidate & (keys >= middle)
            some_mass += tl.where(is_above, whole_weights(value, most, slope), 0)
            some_count += is_above.to(tl.int64)
        mass_here, count_here = tl.sum(some_mass, axis=0), tl.sum(some_count, axis=0)
        reached = mass_here
        if IS_COUNT:
            reached = count_here
        if reached >= goal:
            key, mass, count = middle, mass_here, count_here
        else:
            last_key, mass_above, count_above = middle - 1, mass_here, count_here
    return key, mass, count, mass_above, count_above


@triton.jit
def _weight_at(key, most, slope, SPARE_BITS: tl.constexpr):
    """The weight of a logit with this key, at least 1."""
    bits = (key << SPARE_BITS).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ (0x7FFFFFFF >> SPARE_BITS << SPARE_BITS), bits)
    return tl.maximum(whole_weights(bits.to(tl.float32, bitcast=True), most, slope), 1)


@triton.jit
def _ids(ids_of_values, start, num, is_copied, BLOCK: tl.constexpr):
    """Tokens of candidates, which are copied or in the row itself."""
    places = start + tl.arange(0, BLOCK)
    copied = tl.load(ids_of_values + places, mask=is_copied & (places < num), other=0)
    return tl.where(is_copied, copied, places)


@triton.jit
def _cut(
    source, num, ids_at, is_copied, low, high, most, slope, top_k, top_p, whole, mass_before, count_before, at_mass,
    at_count, last_tie, BLOCK: tl.constexpr, SPARE_BITS: tl.constexpr,
):  # fmt: skip
    """The end of the kept tokens: a key, and the last kept token of those at the key; also the mass of all kept tokens.
    `whole`: mass of the row; `mass_before`, `count_before`: mass and number of the logits above all candidates;
    `at_mass`, `at_count`: mass and number of the candidates."""
    least = tl.full((BLOCK,), 4294967296, tl.int64)
    greatest = tl.full((BLOCK,), -4294967296, tl.int64)
    for start in range(0, num, BLOCK):
        _value, keys, is_candidate = _candidates(source, start, num, low, high, BLOCK, SPARE_BITS)
        least = tl.where(is_candidate, tl.minimum(keys, least), least)
        greatest = tl.where(is_candidate, tl.maximum(keys, greatest), greatest)
    key, last_key = tl.min(least, axis=0), tl.max(greatest, axis=0)
    mass_above, count_above, kept = at_mass * 0, at_count * 0, at_count
    if top_k > 0:
        key, at_mass, at_count, mass_above, count_above = _search(
            source, num, low, high, most, slope, top_k - count_before, True, key, last_key, at_mass, at_count,
            BLOCK, SPARE_BITS,
        )  # fmt: skip
        kept = top_k - count_before - count_above
        whole = mass_before + mass_above + kept * _weight_at(key, most, slope, SPARE_BITS)
    if top_p < 1.0:
        key_before, goal = key, tl.maximum(share_of(whole, top_p), 1) - mass_before
        key, at_mass, at_count, mass_above, count_above = _search(
            source, num, low, high, most, slope, goal, False, key, last_key, at_mass, at_count, BLOCK, SPARE_BITS
        )
        weight = _weight_at(key, most, slope, SPARE_BITS)
        ties = tl.where(key == key_before, kept, at_count)
        kept = tl.minimum(ties, (goal - mass_above + weight - 1) // weight)
        whole = mass_before + mass_above + kept * weight
    if kept < at_count - count_above:
        passed = kept * 0
        for start in range(0, num, BLOCK):
            _value, keys, is_candidate = _candidates(source, start, num, low, high, BLOCK, SPARE_BITS)
            ties = (is_candidate & (keys == key)).to(tl.int64)
            is_last = (ties > 0) & (passed + tl.cumsum(ties, axis=0) == kept)
            ids = _ids(ids_at, start, num, is_copied, BLOCK)
            last_tie = tl.minimum(last_tie, tl.min(tl.where(is_last, ids, last_tie), axis=0))
            passed += tl.sum(ties, axis=0)
    return key, last_tie, whole


@triton.jit
def _split_of(
    stays, target, source, num, ids_at, is_copied, low, high, most, slope, key, last_tie, split_size,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, SPARE_BITS: tl.constexpr,
):  # fmt: skip
    """The split in which the running sum of kept weights exceeds `target`, and the sum before it. `stays`: the mass of
    each split above all candidates, which is kept, [SPLITS]."""
    split, last_split, before = last_tie * 0, last_tie * 0 + SPLITS - 1, target * 0
    while split < last_split:
        middle = (split + last_split) // 2
        some = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(0, num, BLOCK):
            value, keys, is_kept = _candidates(source, start, num, low, high, BLOCK, SPARE_BITS)
            ids = _ids(ids_at, start, num, is_copied, BLOCK)
            is_kept &= (keys > key) | ((keys == key) & (ids <= last_tie))
            is_kept &= ids < (middle + 1) * split_size
            some += tl.where(is_kept, whole_weights(value, most, slope), 0)
        reached = tl.sum(tl.where(tl.arange(0, SPLITS) <= middle, stays, 0), axis=0) + tl.sum(some, axis=0)
        if reached > target:
            last_split = middle
        else:
            split, before = middle + 1, reached
    return split, before


@triton.jit
def _token_in(
    row, start, end, before, target, most, slope, key, last_tie, LANES: tl.constexpr, PER_LANE: tl.constexpr,
    SPARE_BITS: tl.constexpr,
):  # fmt: skip
    """The first kept token from `start` on whose running sum, from `before` on, exceeds `target`; else `end`."""
    token = end
    while start < tl.minimum(end, token):
        ids = start + _block(LANES, PER_LANE)
        value = _load(row, ids, end)
        keys = _keys(value, SPARE_BITS)
        is_kept = (keys > key) | ((keys == key) & (ids <= last_tie))
        weights = tl.where(is_kept, whole_weights(value, most, slope), 0)
        running, added = _running(weights)
        exceeds = before + running + weights > target
        token = tl.min(tl.min(tl.where(exceeds, ids, end), axis=1), axis=0)
        before += added
        start += LANES * PER_LANE
    return token


@triton.jit(do_not_specialize=["num_rows"])
def _draw(
    tokens, logits, stride, vocab_size, temperatures, top_ks, top_ps, seeds, streams, positions, largest, first_tokens,
    last_rounds, bounds, masses, counts, values, ids_of_values, num_rows, split_size, CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr, BOUNDS: tl.constexpr, ROUNDS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
    SPARE_BITS: tl.constexpr,
):  # fmt: skip
    """Draws the token of a row."""
    index = tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    of_splits = tl.load(largest + index * SPLITS + splits)
    most = tl.max(of_splits, axis=0)
    firsts = tl.load(first_tokens + index * SPLITS + splits)
    token = tl.min(tl.where(of_splits == most, firsts, vocab_size), axis=0)
    temperature = tl.load(temperatures + index)
    if temperature > 0.0:
        slope = tl.div_rn(temperature * 0.0 + 1.4426950408889634, temperature)
        row = logits + index.to(tl.int64) * stride
        top_k, top_p, whole = _cuts(masses, counts, top_ks, top_ps, index, num_rows, SPLITS, BOUNDS)
        round = tl.load(last_rounds + (ROUNDS - 1) * num_rows + index)
        mass, count = _sums(masses, counts, index, round, num_rows, SPLITS, BOUNDS)
        of_row, count = tl.sum(mass, axis=0), tl.sum(count, axis=0).to(tl.int64)
        first, last = _bracket(of_row, count, top_k, top_p, whole, BOUNDS)
        is_cut = (top_k > 0) | (top_p < 1.0)
        first = tl.where(is_cut, first, BOUNDS - 1)
        stays = tl.sum(tl.where(tl.arange(0, BOUNDS)[None, :] == first, mass, 0), axis=1)
        low, high = _limits(bounds, round, index, num_rows, first, last, BOUNDS)
        mass_before, count_before = _at(of_row, first, BOUNDS), _at(count, first, BOUNDS)
        at_mass, at_count = _at(of_row, last, BOUNDS) - mass_before, _at(count, last, BOUNDS) - count_before
        # candidates are in the row itself where they are too many to be copied
        source, num, fits = row, vocab_size, at_count <= CAPACITY
        ids_at = ids_of_values + index.to(tl.int64) * CAPACITY
        if fits:
            source, num = values + index.to(tl.int64) * CAPACITY, at_count.to(tl.int32)
        # kept are the tokens above this key, and those at it up to the last tie: all
        key, last_tie = at_mass * 0 - 4294967296, vocab_size
        if is_cut:
            key, last_tie, whole = _cut(
                source, num, ids_at, fits, low, high, most, slope, top_k, top_p, whole, mass_before, count_before,
                at_mass, at_count, last_tie, LANES * PER_LANE, SPARE_BITS,
            )  # fmt: skip
        else:
            num = 0
        seed = tl.load(seeds + index).to(tl.uint64, bitcast=True)
        stream = tl.load(streams + index).to(tl.uint64, bitcast=True)
        u = uniform(seed, stream, tl.load(positions + index).to(tl.uint64, bitcast=True))
        target = tl.minimum(share_of(whole, u), whole - 1)
        split, before = _split_of(
            stays, target, source, num, ids_at, fits, low, high, most, slope, key, last_tie, split_size,
            SPLITS, LANES * PER_LANE, SPARE_BITS,
        )  # fmt: skip
        end = tl.minimum((split + 1) * split_size, vocab_size)
        token = _token_in(
            row, split * split_size, end, before, target, most, slope, key, last_tie, LANES, PER_LANE, SPARE_BITS
        )
    tl.store(tokens + index, tl.where(token < vocab_size, token, 0).to(tl.int64))


def sample(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """Write a token for each row of `logits` to `tokens` [num_rows]."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    if not num_rows:
        return
    per_lane = _LANE_BYTES // logits.element_size()
    split_size = triton.cdiv(vocab_size, _SPLITS * _LANES * per_lane) * _LANES * per_lane
    largest, smallest = torch.empty(2, num_rows, _SPLITS, device=device)
    first_tokens = torch.empty(num_rows, _SPLITS, dtype=torch.int32, device=device)
    bounds = torch.empty(_ROUNDS, num_rows, _BOUNDS, device=device)
    masses = torch.empty(_ROUNDS, num_rows, _SPLITS, _BOUNDS, dtype=torch.int64, device=device)
    counts = torch.empty_like(masses, dtype=torch.int32)
    values = torch.empty(num_rows, _CAPACITY, dtype=logits.dtype, device=device)
    ids = torch.empty(num_rows, _CAPACITY, dtype=torch.int32, device=device)
    source = logits, logits.stride(0), vocab_size
    cuts = rows.temperature, rows.top_k, rows.top_p
    sizes = {"SPLITS": _SPLITS, "LANES": _LANES, "PER_LANE": per_lane, "num_warps": _LANES // 32}
    # weights have the bits of other implementations only where no product and sum are rounded together
    sizes["enable_fp_fusion"] = False
    grid = num_rows, _SPLITS
    mend_interpreter()
    _find_largest[grid](*source, largest, smallest, first_tokens, split_size, **sizes)
    sizes |= {"CAPACITY": _CAPACITY, "BOUNDS": _BOUNDS}
    sums = torch.empty(_ROUNDS, num_rows, dtype=torch.int32, device=device), bounds, masses, counts
    for number in range(_ROUNDS):
        _narrow[grid](*source, *cuts, largest, smallest, *sums, number, num_rows, split_size, **sizes)
    sizes["ROUNDS"] = _ROUNDS
    _copy[grid](*source, *cuts, *sums, values, ids, num_rows, split_size, **sizes)
    _draw[(num_rows,)](
        tokens, *source, *cuts, rows.seeds, rows.streams, rows.positions, largest, first_tokens, *sums, values, ids,
        num_rows, split_size, SPARE_BITS=_SPARE_BITS[logits.dtype], **sizes,
    )  # fmt: skip
