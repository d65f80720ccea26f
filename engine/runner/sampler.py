"""Samples tokens from logits on a CPU: greedy, or drawn after temperature, top-k and top-p, in that order.

A drawn token needs one uniform number per (row, position). With weights w = exp((logit - largest) / temperature), cut
by top-k, then by top-p as a share of what is left, the draw is the first token whose running sum of w exceeds the
number times their total: in order of falling logits where something is cut, else in order of token ids. Equal logits
are in order of token ids. `kernels.sampling` does the same on a GPU.

The number is a pure function of (seed, stream, position), so a retried or moved sequence draws what an undisturbed one
does: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied
once per key so that related keys give unrelated numbers.

Log-probabilities are those of the model's own distribution: before temperature, cuts and all that rows ask of their
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..request import SamplingParams, Sequence, TopLogprobs

# In place of a token where the logits choose none: NaN or infinity among them, or nothing left to choose.
NO_TOKEN = -1
# Sorting a whole vocabulary is avoided: top-p looks at the largest candidates first, and widens when they fall short.
_FIRST_CANDIDATES = 256
# The largest of many are looked for within this distance of the largest, then twice as far and so on.
_NEAR, _FAR, _FEW = 4.0, 256.0, 8
# Numbers of the draws that take the place of tokens which grammars refused.
_SECOND_DRAWS = 2**40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
StopTokens = Callable[[Sequence], Items[int]]


class SampledTokens(NamedTuple):
    """One token for each sequence of a step: `NO_TOKEN` where the largest logit is no finite number. `logprobs`: of
    these tokens, zeros for sequences that did not ask. `tops`: the likeliest tokens, none for sequences that did not
    ask.
    """

    ids: list[int]
    logprobs: list[float]
    tops: list[TopLogprobs]


class TokenRules(Protocol):
    """What rows ask of their next token. See `text.token_rules`."""

    def stop_tokens(self, sequence: Sequence) -> Items[int]:
        """Tokens that are withheld until the row's `min_tokens`."""

    def apply_(self, logits: Tensor, sequences: Items[Sequence], *, checks_later: bool = False) -> None:
        """Change `logits` [num_sequences, vocab_size] to what is left of them; minus infinity is impossible."""

    def refuse_(self, logits: Tensor, sequences: Items[Sequence], tokens: Items[int]) -> list[int]:
        """Places of tokens that must be chosen again, from what is left of their logits."""


def sample(logits: Tensor, sequences: Items[Sequence], rules: TokenRules) -> SampledTokens:
    """Next token of each sequence from `logits` [num_sequences, vocab_size], which may be overwritten."""
    if not sequences:
        return SampledTokens([], [], [])
    asked = [i for i, s in enumerate(sequences) if s.request.sampling.wants_logprobs]
    # not logsumexp: over a whole vocabulary it rounds by the number of rows and of threads
    of_asked = torch.log_softmax(logits[asked].float(), -1) if asked else logits[:0]
    rules.apply_(logits, sequences, checks_later=True)
    tokens = _choose(logits, sequences, list(range(len(sequences))), first_draw=0)
    again = rules.refuse_(logits, sequences, tokens)
    for i, token in zip(again, _choose(logits, sequences, again, first_draw=_SECOND_DRAWS), strict=True):
        tokens[i] = token
    logprobs = [0.0] * len(tokens)
    tops: list[TopLogprobs] = [()] * len(tokens)
    for i, row in zip(asked, of_asked, strict=True):
        logprobs[i] = float(row[tokens[i]])
        if count := sequences[i].request.sampling.top_logprobs:
            likeliest = _largest(row, float(row.max()), min(count, len(row)))
            tops[i] = tuple(zip(likeliest.tolist(), row[likeliest].tolist(), strict=True))
    return SampledTokens(tokens, logprobs, tops)


def _choose(logits: Tensor, sequences: Items[Sequence], rows: list[int], first_draw: int) -> list[int]:
    """A token for each of these rows. `first_draw`: that of a row's first token."""
    if not rows:
        return []
    largest, choice = (logits if len(rows) == len(logits) else logits[rows]).max(-1)  # NaN counts as largest
    tokens: list[int] = torch.where(largest.isfinite(), choice, NO_TOKEN).tolist()
    drawn = [n for n, i in enumerate(rows) if sequences[i].request.sampling.temperature > 0 and tokens[n] != NO_TOKEN]
    for n, u in zip(drawn, _uniforms([sequences[rows[n]] for n in drawn], first_draw), strict=True):
        i = rows[n]
        tokens[n] = _draw(logits[i], float(largest[n]), sequences[i].request.sampling, float(u))
    return tokens


def _uniforms(sequences: Items[Sequence], first_draw: int) -> np.ndarray:
    keys = [(s.request.sampling.seed, s.request.stream_id, first_draw + len(s.token_ids)) for s in sequences]
    columns = np.array(keys, dtype=np.uint64).reshape(-1, 3)
    return uniforms(columns[:, 0], columns[:, 1], columns[:, 2])


def _draw(logits: Tensor, largest: float, sampling: SamplingParams, u: float) -> int:
    """One token from `logits` [vocab_size], of which `largest` is the largest, by the uniform number `u`."""
    vocab_size = logits.numel()

    def weights_of(values: Tensor) -> Tensor:
        # distances from the largest: no temperature is too small for them
        return values.double().sub_(largest).div_(sampling.temperature).exp_()

    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return _pick(weights_of(logits).cumsum(-1), u)
    # the last running sum, not the sum: that rounds by the number of threads
    total = None if sampling.top_k else weights_of(logits).cumsum(-1)[-1]
    width = min(sampling.top_k or _FIRST_CANDIDATES, vocab_size)
    while True:
        ids = _largest(logits, largest, width)
        candidates = weights_of(logits[ids])
        reached = candidates.cumsum(-1)
        # top-p is a share of what top-k leaves
        goal = sampling.top_p * (reached[-1] if total is None else total)
        num_kept = max(1, int((reached - candidates < goal).sum()))
        if sampling.top_k or num_kept < width or width == vocab_size:
            return int(ids[_pick(reached[:num_kept], u)])
        width = min(width * 8, vocab_size)


def _largest(logits: Tensor, largest: float, count: int) -> Tensor:
    """Ids of the `count` largest, in falling order, equals in order of their ids."""
    if count * _FEW < len(logits):
        # looked for among those near the largest: a tenth of the time
        distance = _NEAR
        while distance < _FAR:
            near = (logits >= largest - distance).nonzero()[:, 0]
            if len(near) >= count:
                return near[logits[near].argsort(descending=True, stable=True)[:count]]
            distance *= 2
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    return ids[logits[ids].argsort(descending=True, stable=True)[:count]]


def _pick(cumulative: Tensor, u: float) -> int:
    """Index at which the running sum (fp64) first exceeds `u` times its end."""
    index = int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True)[0])
    return min(index, cumulative.numel() - 1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, stream, position); all inputs and the result have the same shape."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _mix(seeds + _GOLDEN)
        state = _mix((state ^ streams) + _GOLDEN)
        state = _mix((state ^ positions) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
