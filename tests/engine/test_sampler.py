"""Sampling: the right distribution, the right cuts, numbers that depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.random_stream import uniforms
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.sampler import sample
from lorabatch.engine.sequence import Sequence

NO_STOP = torch.tensor([], dtype=torch.int64)


def rows(sampling: SamplingParams, count: int, first_stream: int = 0) -> list[Sequence]:
    return [Sequence(Request(f"{i}", (1,), None, sampling, stream_id=first_stream + i)) for i in range(count)]


def frequencies(logits: torch.Tensor, sampling: SamplingParams, draws: int = 4000) -> np.ndarray:
    tokens, _ = sample(logits.repeat(draws, 1), rows(sampling, draws), NO_STOP)
    return np.bincount(tokens, minlength=logits.numel()) / draws


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    expected = torch.softmax(logits / 0.7, -1).numpy()
    assert np.abs(frequencies(logits, SamplingParams(temperature=0.7)) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(temperature=5.0, top_k=2), {7, 8}),
        # probabilities 0.5, 0.3, 0.2: the second one is needed to reach 0.6
        (SamplingParams(temperature=1.0, top_p=0.6), {7, 8}),
        (SamplingParams(temperature=1.0, top_p=0.4), {7}),
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.5), {7}),
    ],
)
def test_only_the_largest_candidates_are_drawn(sampling: SamplingParams, allowed: set[int]) -> None:
    logits = torch.full((10,), -torch.inf)
    logits[7:10] = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(np.flatnonzero(frequencies(logits, sampling, draws=500))) == allowed


def test_top_p_looks_beyond_the_first_candidates_when_they_do_not_reach_p() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    assert (frequencies(torch.zeros(1000), sampling, draws=3000) > 0).sum() > 800


def test_temperature_zero_takes_the_largest() -> None:
    tokens, _ = sample(torch.tensor([[0.0, 3.0, 1.0]]), rows(SamplingParams(), 1), NO_STOP)
    assert tokens == [1]


def test_stop_tokens_are_withheld_before_min_tokens_and_log_probabilities_stay_those_of_the_model() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    expected = float(logits.log_softmax(-1)[0, 2])
    asked = rows(SamplingParams(min_tokens=1, logprobs=True), 1)
    tokens, logprobs = sample(logits.clone(), asked, torch.tensor([1]))
    assert tokens == [2]
    assert logprobs == pytest.approx([expected])


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_uniform_number_is_a_function_of_its_key(seed: int, stream: int, position: int) -> None:
    key = [np.array([k], np.uint64) for k in (seed, stream, position)]
    together = [np.array([k, 1, 2], np.uint64) for k in (seed, stream, position)]
    assert uniforms(*key)[0] == uniforms(*together)[0]
    assert 0 <= uniforms(*key)[0] < 1


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    zeros = np.zeros_like(positions)
    for keys in ((positions, zeros, zeros), (zeros, positions, zeros), (zeros, zeros, positions)):
        u = uniforms(*keys)
        assert abs(u.mean() - 0.5) < 0.01
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
