"""From logits to tokens: greedy, or drawn after temperature, top-k and top-p, in that order.

A drawn token needs one uniform number per (row, position): probabilities are cut, and the number picks along
their cumulative sum. Sorting a whole vocabulary is avoided: top-p looks at the largest candidates first and
widens only when they do not reach p.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from .random_stream import uniforms
from .sequence import Sequence

_FIRST_CANDIDATES = 256


def sample(logits: Tensor, sequences: Rows[Sequence], stop_token_ids: Tensor) -> tuple[list[int], list[float]]:
    """Next token of each sequence from `logits` [num_sequences, vocab_size], which may be overwritten.

    Returns token ids and the log-probabilities of the chosen tokens under the unmodified distribution (zeros
    when no sequence asked for them). Stop tokens are withheld until `min_tokens`.
    """
    wants_logprobs = any(s.request.sampling.logprobs for s in sequences)
    raw = logits.float().clone() if wants_logprobs else None
    too_short = [i for i, s in enumerate(sequences) if len(s.token_ids) < s.request.sampling.min_tokens]
    if too_short and stop_token_ids.numel():
        rows = torch.tensor(too_short, device=logits.device)
        logits[rows[:, None], stop_token_ids[None, :]] = -torch.inf
    tokens = logits.argmax(-1).tolist()
    drawn = [i for i, s in enumerate(sequences) if s.request.sampling.temperature > 0]
    for i, u in zip(drawn, _uniforms([sequences[i] for i in drawn]), strict=True):
        tokens[i] = _draw(logits[i].float(), sequences[i], float(u))
    if raw is None:
        return tokens, [0.0] * len(tokens)
    chosen = torch.tensor(tokens, device=raw.device)[:, None]
    # one by one: over several rows at once the sum of a row may round otherwise
    totals = torch.stack([row.logsumexp(-1) for row in raw])
    logprobs = (raw.gather(1, chosen)[:, 0] - totals).tolist()
    return tokens, logprobs


def _uniforms(sequences: Rows[Sequence]) -> np.ndarray:
    keys = [(s.request.sampling.seed, s.request.stream_id, len(s.token_ids)) for s in sequences]
    columns = np.array(keys, dtype=np.uint64).reshape(-1, 3)
    return uniforms(columns[:, 0], columns[:, 1], columns[:, 2])


def _draw(logits: Tensor, sequence: Sequence, u: float) -> int:
    """One token from `logits` [vocab_size] by the uniform number `u`."""
    sampling = sequence.request.sampling
    logits = logits / sampling.temperature
    vocab_size = logits.numel()
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return _pick(torch.softmax(logits.double(), -1), u)
    width = min(sampling.top_k or _FIRST_CANDIDATES, vocab_size)
    # top-p is a share of what top-k leaves
    log_total = None if sampling.top_k else logits.double().logsumexp(-1)
    while True:
        values, ids = logits.topk(width)  # sorted, largest first
        values = values.double()
        probabilities = (values - (values.logsumexp(-1) if log_total is None else log_total)).exp()
        before = probabilities.cumsum(-1) - probabilities
        kept = int((before < sampling.top_p).sum())
        if sampling.top_k or kept < width or width == vocab_size:
            return int(ids[_pick(probabilities[:kept], u)])
        width = min(width * 8, vocab_size)


def _pick(probabilities: Tensor, u: float) -> int:
    """Index at which the cumulative sum of `probabilities` (fp64) first exceeds `u` times their total."""
    cumulative = probabilities.cumsum(-1)
    target = cumulative.new_tensor([u]) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True)[0])
    return min(index, probabilities.numel() - 1)
