"""Samples tokens from logits on a CPU: greedy, or drawn after temperature, top-k and top-p, in that order.

A drawn token needs one uniform number per (row, position). With weights w = exp((logit - largest) / temperature), cut
by top-k, then by top-p as a share of what is left, the draw is the first token whose running sum of w exceeds the
number times their total: in order of falling logits where something is cut, else in order of token ids. Equal logits
are in order of token ids. `kernels.sampling` does the same on a GPU.

The number is a pure function of (seed, stream, position), so a retried or moved sequence draws what an undisturbed one
does: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied
once per key so that related keys give unrelated numbers.

Log-probabilities are those of the model's own distribution: before temperature, cuts and withheld stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..request import SamplingParams, Sequence

# In place of a token where the logits choose none: NaN or infinity among them, or nothing left to choose.
NO_TOKEN = -1
# Sorting a whole vocabulary is avoided: top-p looks at the largest candidates first, and widens when they fall short.
_FIRST_CANDIDATES = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
StopTokens = Callable[[Sequence], Items[int]]


def sample(logits: Tensor, sequences: Items[Sequence], stop_tokens: StopTokens) -> tuple[list[int], list[float]]:
    """Next token of each sequence from `logits` [num_sequences, vocab_size], which may be overwritten.

    Returns token ids (`NO_TOKEN` where the largest logit is no finite number) and the log-probabilities of the chosen
    tokens (zeros for sequences that did not ask). A sequence's `stop_tokens` are withheld until its `min_tokens`.
    """
    asked = [i for i, s in enumerate(sequences) if s.request.sampling.logprobs]
    # not logsumexp: over a whole vocabulary it rounds by the number of rows and of threads
    of_asked = torch.log_softmax(logits[asked].float(), -1) if asked else logits[:0]
    for i, sequence in enumerate(sequences):
        if len(sequence.token_ids) < sequence.request.sampling.min_tokens:
            withheld = [t for t in stop_tokens(sequence) if t < logits.shape[1]]
            logits[i, withheld] = -torch.inf
    largest, choice = logits.max(-1)  # NaN counts as largest
    tokens: list[int] = torch.where(largest.isfinite(), choice, NO_TOKEN).tolist()
    drawn = [i for i, s in enumerate(sequences) if s.request.sampling.temperature > 0 and tokens[i] != NO_TOKEN]
    for i, u in zip(drawn, _uniforms([sequences[i] for i in drawn]), strict=True):
        tokens[i] = _draw(logits[i], sequences[i].request.sampling, float(u))
    logprobs = [0.0] * len(tokens)
    for i, row in zip(asked, of_asked, strict=True):
        logprobs[i] = float(row[tokens[i]])
    return tokens, logprobs


def _uniforms(sequences: Items[Sequence]) -> np.ndarray:
    keys = [(s.request.sampling.seed, s.request.stream_id, len(s.token_ids)) for s in sequences]
    columns = np.array(keys, dtype=np.uint64).reshape(-1, 3)
    return uniforms(columns[:, 0], columns[:, 1], columns[:, 2])


def _draw(logits: Tensor, sampling: SamplingParams, u: float) -> int:
    """One token from `logits` [vocab_size] by the uniform number `u`."""
    vocab_size = logits.numel()
    # distances from the largest: no temperature is too small for them
    distances = logits.double()
    weights = ((distances - distances.max()) / sampling.temperature).exp()
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return _pick(weights, u)
    width = min(sampling.top_k or _FIRST_CANDIDATES, vocab_size)
    # the last running sum, not the sum: that rounds by the number of threads
    total = weights.cumsum(-1)[-1]
    while True:
        ids = _largest(logits, width)
        candidates = weights[ids]
        reached = candidates.cumsum(-1)
        # top-p is a share of what top-k leaves
        goal = sampling.top_p * (reached[-1] if sampling.top_k else total)
        num_kept = max(1, int((reached - candidates < goal).sum()))
        if sampling.top_k or num_kept < width or width == vocab_size:
            return int(ids[_pick(candidates[:num_kept], u)])
        width = min(width * 8, vocab_size)


def _largest(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest, in falling order, equals in order of their ids (which `topk` leaves open)."""
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    return ids[logits[ids].argsort(descending=True, stable=True)[:count]]


def _pick(weights: Tensor, u: float) -> int:
    """Index at which the running sum of `weights` (fp64) first exceeds `u` times their total."""
    cumulative = weights.cumsum(-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True)[0])
    return min(index, weights.numel() - 1)


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
