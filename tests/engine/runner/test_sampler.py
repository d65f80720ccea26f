"""Sampling: the right distribution, the right cuts, numbers that depend on the row alone."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.sampler import sample, uniforms
from lorabatch.engine.sequence import Sequence
from lorabatch.kernels.launch import is_interpreted
from lorabatch.kernels.sampling import NO_TOKEN, SamplingRows, sample_tokens

INF = math.inf
ROUNDING = 1e-6


class WithoutRules:
    def stop_tokens(self, sequence: Sequence) -> tuple[int, ...]:
        return ()

    def apply_(self, logits: torch.Tensor, sequences: Items[Sequence], *, checks_later: bool = False) -> None:
        """Leaves logits as they are."""

    def refused(self, sequences: Items[Sequence], tokens: Items[int], vocab_size: int) -> list[int]:
        return []

    def is_forced(self, sequence: Sequence, vocab_size: int) -> bool:
        raise AssertionError("nothing was refused")

    def allowed(self, sequences: Items[Sequence], vocab_size: int) -> np.ndarray:
        raise AssertionError("nothing was refused")


no_rules = WithoutRules()


def rows(sampling: SamplingParams, count: int, first_stream: int = 0) -> list[Sequence]:
    return [Sequence(Request(f"{i}", (1,), None, sampling, stream_id=first_stream + i)) for i in range(count)]


def frequencies(logits: torch.Tensor, sampling: SamplingParams, draws: int = 4000) -> np.ndarray:
    tokens, *_ = sample(logits.repeat(draws, 1), rows(sampling, draws), no_rules)
    return np.bincount(tokens, minlength=logits.numel()) / draws


def plain_uniform(seed: int, stream: int, position: int) -> float:
    """SplitMix64's finaliser, once per key, in plain integers."""
    mask, state = 2**64 - 1, 0
    for key in (seed, stream, position):
        state = ((state ^ key) + 0x9E3779B97F4A7C15) & mask
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return (state >> 11) / 2**53


def plain_draws(logits: list[float], sampling: SamplingParams, u: float) -> set[int]:
    """The token that `u` draws, by the book; several where `u` or top-p is on the border between them but for rounding:
    weights are fp32 numbers."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if sampling.temperature == 0:
        return {order[0]}
    weights = {i: math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order}
    kept = order[: sampling.top_k or None]
    before = np.cumsum([0.0, *(weights[i] for i in kept)])[:-1]
    goal = sampling.top_p * math.fsum(weights[i] for i in kept)
    errors = (-ROUNDING, ROUNDING) if sampling.top_p < 1 else (INF, INF)
    least, most = (max(1, int((before < goal * (1 + error)).sum())) for error in errors)
    found = set()
    for num_kept in range(least, most + 1):
        shown = sorted(kept[:num_kept])
        running = np.cumsum([weights[i] for i in shown])
        first, last = (int((running <= running[-1] * (u + error)).sum()) for error in (-ROUNDING, ROUNDING))
        found.update(shown[first : last + 1])
    return found


some_logits = st.lists(
    st.one_of(
        # A temperature has a least value (`SMALLEST_TEMPERATURE`); logits of models do not differ by less than it.
        st.floats(-30, 30, width=32).map(lambda logit: logit if abs(logit) > 1e-20 else 0.0),
        st.sampled_from((0.0, -0.0, 1.0, 1.0, -INF, -INF, 1e30, -1e30)),
    ),
    min_size=1,
    max_size=40,
).filter(lambda values: max(values) > -INF)

some_sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 5e-324, 1e-30, 1e-3, 0.3, 1.0, 2.5, 1e6)),
    top_k=st.sampled_from((0, 0, 1, 2, 5, 39, 40, 41, 10**6)),
    top_p=st.sampled_from((1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999)),
    seed=st.sampled_from((0, 1, 2**63 - 1)),
    logprobs=st.booleans(),
)


@settings(max_examples=examples(600), deadline=None)
@given(some_logits, some_sampling, st.integers(0, 2**64 - 1))
def test_every_choice_is_the_one_by_the_book(logits: list[float], sampling: SamplingParams, stream: int) -> None:
    assert not sampling.problems()
    row = Sequence(Request("row", (1,), None, sampling, stream_id=stream))
    (token,), (logprob,), *_ = sample(torch.tensor([logits]), [row], no_rules)
    exact = np.array(logits, np.float32).astype(float).tolist()
    assert token in plain_draws(exact, sampling, plain_uniform(sampling.seed, stream, 0))
    assert exact[token] > -INF
    if sampling.logprobs:
        expected = exact[token] - max(exact) - math.log(math.fsum(math.exp(x - max(exact)) for x in exact))
        assert logprob == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.floats(-8, 8, width=16), min_size=300, max_size=400), some_sampling, st.integers(0, 2**64 - 1))
def test_cuts_beyond_the_first_candidates_are_by_the_book_too(
    logits: list[float], sampling: SamplingParams, stream: int
) -> None:
    row = Sequence(Request("row", (1,), None, sampling, stream_id=stream))
    (token,), *_ = sample(torch.tensor([logits]), [row], no_rules)
    assert token in plain_draws(logits, sampling, plain_uniform(sampling.seed, stream, 0))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.lists(some_sampling, min_size=2, max_size=6))
def test_a_row_draws_the_same_in_any_company_and_as_on_a_gpu(seed: int, samplings: list[SamplingParams]) -> None:
    samplings = [s for s in samplings if s.temperature == 0 or s.temperature > 1e-2]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), 500, generator=generator) * 4
    sequences = [Sequence(Request("row", (1,), None, s, stream_id=seed + i)) for i, s in enumerate(samplings)]
    together = sample(logits.clone(), sequences, no_rules)[0] if samplings else []
    for i, sequence in enumerate(sequences):
        assert sample(logits[i : i + 1].clone(), [sequence], no_rules)[0] == together[i : i + 1]
    device = "cpu" if is_interpreted() else "cuda"
    columns = (
        torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
        torch.tensor([s.top_k for s in samplings], dtype=torch.int32),
        torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        torch.tensor([s.seed for s in samplings]),
        torch.tensor([s.request.stream_id for s in sequences]),
        torch.zeros(len(samplings), dtype=torch.int64),
    )
    found = sample_tokens(logits.to(device), SamplingRows(*(column.to(device) for column in columns)))
    assert found.tolist() == together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
def test_logits_that_choose_nothing_give_no_token_and_leave_other_rows_alone(
    bad: list[float], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=2, logprobs=True)
    logits = torch.tensor([[0.0, 3.0, 1.0], bad, [5.0, 0.0, 0.0]])
    tokens, logprobs, *_ = sample(logits.clone(), rows(sampling, 3), no_rules)
    alone = [sample(logits[i : i + 1].clone(), rows(sampling, 3)[i : i + 1], no_rules) for i in (0, 2)]
    assert tokens[1] == NO_TOKEN
    assert [tokens[0], tokens[2]] == [one.ids[0] for one in alone]
    assert [logprobs[0], logprobs[2]] == [one.logprobs[0] for one in alone]


@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 0.1, 3.0, 100.0]), count=st.integers(1, 70))
@settings(max_examples=examples(40), deadline=None)
def test_of_many_logits_the_largest_are_those_by_the_book(seed: int, spread: float, count: int) -> None:
    logits = (torch.randn(2000, generator=torch.Generator().manual_seed(seed)) * spread).round(decimals=1)
    logits[seed % 7 :: 3] = -INF
    expected = sorted(range(2000), key=lambda i: (-float(logits[i]), i))[:count]
    asked = rows(SamplingParams(top_logprobs=min(count, 20), temperature=1.0, top_k=count), 1)
    (token,), _, (top,), *_ = sample(logits[None].clone(), asked, no_rules)
    assert [i for i, _ in top] == expected[:20]
    assert token in expected


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    expected = torch.softmax(logits / 0.7, -1).numpy()
    assert np.abs(frequencies(logits, SamplingParams(temperature=0.7)) - expected).max() < 0.03


def test_top_p_looks_beyond_the_first_candidates_when_they_do_not_reach_p() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    assert (frequencies(torch.zeros(1000), sampling, draws=3000) > 0).sum() > 800


class Forbidding(WithoutRules):
    def apply_(self, logits: torch.Tensor, sequences: Items[Sequence], *, checks_later: bool = False) -> None:
        logits[:, 1] = -INF


def test_log_probabilities_stay_those_of_the_model_where_rows_ask_something_of_their_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    expected = float(logits.log_softmax(-1)[0, 2])
    asked = rows(SamplingParams(min_tokens=1, logprobs=True), 1)
    tokens, logprobs, *_ = sample(logits.clone(), asked, Forbidding())
    assert tokens == [2]
    assert logprobs == pytest.approx([expected])


@pytest.mark.parametrize("vocab_size", [300, 49152])
def test_log_probabilities_have_the_same_bits_for_any_number_of_rows_and_threads(vocab_size: int) -> None:
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)) * 5
    asked = rows(SamplingParams(logprobs=True), 9)
    before = torch.get_num_threads()
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(sample(logits.clone(), asked, no_rules)[1])
        found.append([sample(logits[i : i + 1].clone(), asked[i : i + 1], no_rules)[1][0] for i in range(9)])
    torch.set_num_threads(before)
    assert all(numbers == found[0] for numbers in found)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_uniform_number_is_a_function_of_its_key(seed: int, stream: int, position: int) -> None:
    key = [np.array([k], np.uint64) for k in (seed, stream, position)]
    together = [np.array([k, 1, 2], np.uint64) for k in (seed, stream, position)]
    assert uniforms(*key)[0] == uniforms(*together)[0] == plain_uniform(seed, stream, position)
    assert 0 <= uniforms(*key)[0] < 1


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    zeros = np.zeros_like(positions)
    for keys in ((positions, zeros, zeros), (zeros, positions, zeros), (zeros, zeros, positions)):
        u = uniforms(*keys)
        assert abs(u.mean() - 0.5) < 0.01
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
