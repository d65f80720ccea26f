"""Samples tokens from logits on a CPU: greedy, or drawn after temperature, top-k and top-p, in that order.

A drawn token needs one uniform number per (row, position); `kernels.sampling` says how it chooses. The number is a pure
function of (seed, stream, position), so a retried or moved sequence draws what an undisturbed one does: the finaliser
of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), applied once per key so that
related keys give unrelated numbers.

Log-probabilities are those of the model's own distribution: before temperature, cuts and all that rows ask of their
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.sampling import NO_TOKEN, Choices, choose_further_tokens, choose_tokens, largest_of_rows
from ..models.step_batch import ScoredPositions
from ..request import SamplingParams, TopLogprobs
from ..sequence import Sequence
from ..teacher import pack, token_bytes

if TYPE_CHECKING:
    from ..text.answers.token_rules import TokenRules  # not at run time: members of a group read no texts

# Tokens that are tried in the place of one that a grammar refused, before all that it allows are found.
_NUM_TRIED = 16
# The draws of each try have numbers of their own.
_NEXT_DRAW = 2**40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


#: Log-probabilities of consecutive tokens of a sequence, those of its prompt first, the likeliest tokens in their
#: places, if asked, and those of a given completion, packed (`teacher`).
PromptLogprobs = tuple[Sequence, list[float], list[TopLogprobs], bytes]


class SampledTokens(NamedTuple):
    """One token for each sequence of a step: `NO_TOKEN` where the largest logit is no finite number. `logprobs`: of
    these tokens, zeros for sequences that did not ask. `tops`: the likeliest tokens, none for sequences that did not
    ask. `asked`: log-probabilities of each sequence's `asked_tokens`. `prompts`: of prompts of the step. `states`:
    hidden states of prompts of the step, [num_places, embedding_size] of each sequence. `teacher`: the likeliest
    tokens, packed, empty for sequences that did not ask; no items where none did.
    """

    ids: list[int]
    logprobs: list[float]
    tops: list[TopLogprobs]
    asked: list[tuple[float, ...]]
    prompts: Items[PromptLogprobs] = ()
    states: Items[tuple[Sequence, NDArray[np.float32]]] = ()
    teacher: Items[bytes] = ()


def sample(logits: Tensor, sequences: Items[Sequence], rules: TokenRules) -> SampledTokens:
    """Next token of each sequence from `logits` [num_sequences, vocab_size], which may be overwritten."""
    if not sequences:
        return SampledTokens([], [], [], [])
    asked = [i for i, s in enumerate(sequences) if s.request.sampling.wants_logprobs or s.asked_tokens]
    # not logsumexp: over a whole vocabulary it rounds by the number of rows and of threads
    of_asked = torch.log_softmax(logits[asked].float(), -1) if asked else logits[:0]
    rules.apply_(logits, sequences, checks_later=True)
    tokens = choose_tokens(logits, _choices(sequences, list(range(len(sequences)))))
    _choose_again(logits, sequences, rules, tokens)
    logprobs = [0.0] * len(tokens)
    tops: list[TopLogprobs] = [()] * len(tokens)
    of_tokens: list[tuple[float, ...]] = [()] * len(tokens)
    settings = [sequences[i].request.sampling for i in asked]
    num_top = max((max(s.top_logprobs, s.teacher_top_k) for s in settings), default=0)
    top, ids = largest_of_rows(of_asked, min(num_top, of_asked.shape[1])) if num_top else _none_of(of_asked)
    for place, (i, row) in enumerate(zip(asked, of_asked, strict=True)):
        logprobs[i] = float(row[tokens[i]])
        of_tokens[i] = _of_tokens(row, sequences[i].asked_tokens)
        if count := settings[place].top_logprobs:
            (tops[i],) = _tops(ids[place : place + 1], top[place : place + 1], count)
    teacher = [b""] * len(tokens)
    for i, packed in zip(asked, packed_rows(settings, ids, top), strict=True):
        teacher[i] = packed
    return SampledTokens(tokens, logprobs, tops, of_tokens, teacher=teacher)


def packed_rows(settings: Items[SamplingParams], ids: Tensor, top: Tensor) -> list[bytes]:
    """The likeliest tokens of rows, packed; empty for those that do not ask. `ids` and `top` [num_rows, num_top]."""
    packed = [b""] * len(settings)
    for count in {sampling.teacher_top_k for sampling in settings} - {0}:
        size, rows = token_bytes(count), pack(ids[:, :count].numpy(), top[:, :count].numpy())
        for place, sampling in enumerate(settings):
            if sampling.teacher_top_k == count:
                packed[place] = rows[place * size : (place + 1) * size]
    return packed


def score_prompts(blocks: Iterable[Tensor], scored: Items[ScoredPositions]) -> list[PromptLogprobs]:
    """Log-probabilities at places of prompts and given completions. `blocks`: logits [num_places, vocab_size] in the
    order of the places, those of some places at a time, so that no more of them are in memory.
    """
    if not scored:
        return []
    tokens = torch.tensor([token for places in scored for token in places.token_ids])
    found, first = [], 0
    for block in blocks:
        here = slice(first, first + len(block))
        first = here.stop
        found.append(score_rows(torch.log_softmax(block.float(), -1), tokens[here], most_likeliest(scored)))
    return list(read_prompts(scored, *map(torch.cat, zip(*found, strict=True))))


def most_likeliest(scored: Items[ScoredPositions]) -> int:
    """Most of the likeliest tokens that are asked of one of these places."""
    settings = [places.sequence.request.sampling for places in scored]
    in_prompts = max(s.prompt_top_logprobs for s in settings)
    return max(in_prompts, *(max(s.top_logprobs, s.teacher_top_k) for s in settings if s.is_given), 0)


def score_rows(rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [num_places] of `tokens` [num_places], and the `num_top` likeliest tokens of each place,
    [num_places, num_top], their log-probabilities first. `rows` [num_places, vocab_size]: of all tokens.
    """
    is_known = tokens < rows.shape[1]  # an adapter may have more than the model
    logprobs = rows.gather(1, tokens.where(is_known, 0)[:, None])[:, 0].where(is_known, -torch.inf)
    likeliest = largest_of_rows(rows, min(num_top, rows.shape[1])) if num_top else _none_of(rows)
    return logprobs, *likeliest


def split_states(states: Tensor, pooled: Items[tuple[Sequence, int]]) -> list[tuple[Sequence, NDArray[np.float32]]]:
    """Hidden states [num_places of all, embedding_size] by sequence. `pooled`: sequences and their numbers of places,
    in the order of the states.
    """
    if not pooled:
        return []
    parts = torch.split(states.float().cpu(), [count for _, count in pooled])
    return [(sequence, part.numpy()) for (sequence, _), part in zip(pooled, parts, strict=True)]


def read_prompts(
    scored: Items[ScoredPositions], logprobs: Tensor, top: Tensor, ids: Tensor
) -> Iterator[PromptLogprobs]:
    """Log-probabilities of each sequence whose places were scored. On the host: `logprobs` [num_places], `top` and
    `ids` [num_places, num_top].
    """
    first = 0
    for places in scored:
        start, stop = first, first + len(places.token_ids)
        first, behind = stop, start + places.num_in_prompt
        sampling = places.sequence.request.sampling
        tops = _tops(ids[start:behind], top[start:behind], sampling.prompt_top_logprobs)
        tops += _tops(ids[behind:stop], top[behind:stop], sampling.top_logprobs)
        count = sampling.teacher_top_k if behind < stop else 0
        teacher = pack(ids[behind:stop, :count].numpy(), top[behind:stop, :count].numpy()) if count else b""
        yield places.sequence, logprobs[start:stop].tolist(), tops, teacher


def _none_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """No numbers of each row and no places."""
    return rows[:, :0], rows[:, :0].long()


def _tops(ids: Tensor, logprobs: Tensor, count: int) -> list[TopLogprobs]:
    """The first `count` tokens and log-probabilities of each row of `ids` and `logprobs` [num_rows, num_top]."""
    pairs = zip(ids[:, :count].tolist(), logprobs[:, :count].tolist(), strict=True)
    return [tuple(zip(tokens, values, strict=True)) for tokens, values in pairs]


def _of_tokens(logprobs: Tensor, token_ids: Items[int]) -> tuple[float, ...]:
    """Log-probabilities [vocab_size] of some tokens; what the model does not have is impossible."""
    known = logprobs[[min(token, len(logprobs) - 1) for token in token_ids]].tolist()
    return tuple(p if token < len(logprobs) else -np.inf for token, p in zip(token_ids, known, strict=True))


def _choose_again(logits: Tensor, sequences: Items[Sequence], rules: TokenRules, tokens: list[int]) -> None:
    """Put others in the place of tokens that rules refuse: what would have been chosen without them, if that is allowed
    soon, else a choice among all that is allowed. The result has the distribution of that choice.
    """
    vocab_size = logits.shape[1]
    refused = rules.refused(sequences, tokens, vocab_size)
    if not refused:
        return
    left = [i for i in refused if rules.is_forced(sequences[i], vocab_size)]
    tried = [i for i in refused if i not in left]
    for i, candidates in zip(tried, _further(logits, sequences, tried, tokens), strict=True):
        found = (token for token in candidates if not rules.refused([sequences[i]], [token], vocab_size))
        tokens[i] = next(found, NO_TOKEN)
    left += [i for i in tried if tokens[i] == NO_TOKEN]
    if left:
        allowed = rules.allowed([sequences[i] for i in left], vocab_size)
        choices = _choices(sequences, left, _NEXT_DRAW * (_NUM_TRIED + 1))
        for i, token in zip(left, choose_tokens(logits, choices, allowed), strict=True):
            tokens[i] = token


def _further(logits: Tensor, sequences: Items[Sequence], rows: list[int], tokens: list[int]) -> Items[Iterable[int]]:
    """Tokens to try instead of those of these rows."""
    if not rows:
        return []
    numbers = _uniforms([sequences[i] for i in rows], _NEXT_DRAW * np.arange(1, _NUM_TRIED + 1, dtype=np.uint64))
    chosen = np.array([tokens[i] for i in rows], np.int64)
    return choose_further_tokens(logits, _choices(sequences, rows), chosen, numbers)


def _choices(sequences: Items[Sequence], rows: list[int], first_draw: int = 0) -> Choices:
    """How the token of each of these rows is chosen. `first_draw`: number of the draw of a row's first token."""
    samplings = [sequences[i].request.sampling for i in rows]
    # rows that are led through a tree of texts take no token
    temperature = np.array(
        [0.0 if sequences[i].is_scoring else sequences[i].request.sampling.temperature for i in rows]
    )
    numbers = np.zeros(len(rows))
    drawn = temperature.nonzero()[0]
    if len(drawn):
        first = np.array([first_draw], np.uint64)
        numbers[drawn] = _uniforms([sequences[rows[n]] for n in drawn], first)[:, 0]
    return Choices(
        np.array(rows, np.int64),
        temperature,
        np.array([s.top_k for s in samplings], np.int64),
        np.array([s.top_p for s in samplings]),
        numbers,
    )


def _uniforms(sequences: Items[Sequence], first_draws: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) for the next token of each sequence, [num_sequences, num_draws]. `first_draws`: numbers of the
    draws of a row's first token.
    """
    keys = [(s.request.sampling.seed, s.request.stream_id, len(s.token_ids)) for s in sequences]
    columns = np.array(keys, dtype=np.uint64).reshape(-1, 3)
    draws = columns[:, 2:] + first_draws
    return uniforms(columns[:, :1], columns[:, 1:2], draws)


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
