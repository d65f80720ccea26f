"""Choices on a CPU: the compiled kernel and torch choose the same tokens, at the sizes of real vocabularies.

Which tokens those are by the book is tested through the engine's sampler (`engine/runner/test_sampler.py`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.kernels.sampling import NO_TOKEN, Choices, choose_further_tokens, choose_tokens
from lorabatch.kernels.sampling.cpu import _further_by_torch, choose_by_torch

SIZES = (1, 2, 7, 255, 257, 5000, 49152, 50257)


def choices(num_rows: int, generator: np.random.Generator, num_logits: int) -> Choices:
    return Choices(
        generator.permutation(num_logits)[:num_rows],
        generator.choice([0.0, 5e-324, 0.1, 0.7, 1.0, 1.5, 100.0], num_rows),
        generator.choice([0, 0, 1, 50, 700, 10**6], num_rows),
        generator.choice([1.0, 1.0, 1e-9, 0.5, 0.9, 0.99], num_rows),
        generator.random(num_rows),
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from(SIZES),
    spread=st.sampled_from([0.0, 0.05, 0.5, 2.5, 20.0]),
    decimals=st.sampled_from([0, 1, 6]),
)
def test_compiled_choices_are_those_of_torch(seed: int, vocab_size: int, spread: float, decimals: int) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((6, vocab_size + 3)) * spread).round(decimals)
    values[:, generator.integers(0, vocab_size, vocab_size // 5)] = -np.inf
    values[:, -4] = spread
    logits = torch.from_numpy(values.astype(np.float32))[:, :vocab_size]
    asked = choices(5, generator, len(logits))
    assert choose_tokens(logits.clone(), asked) == choose_by_torch(logits, asked)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 31, 32, 33, 5000, 49152]),
    share=st.sampled_from([0.0, 1e-4, 0.03, 0.5, 1.0]),
    spare_words=st.integers(0, 2),
)
def test_what_a_mask_does_not_allow_is_not_chosen(seed: int, vocab_size: int, share: float, spare_words: int) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((6, vocab_size + 3)) * 3).round(2).astype(np.float32)
    logits = torch.from_numpy(values)[:, :vocab_size]
    asked = choices(5, generator, len(logits))
    bits = generator.random((5, (-(-vocab_size // 32) + spare_words) * 32)) < share
    bits[:, vocab_size:] = True
    bits[0, : vocab_size // 32 * 32] = True
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    before = logits.clone()
    found = choose_tokens(logits, asked, allowed)
    assert torch.equal(logits, before)
    masked = logits[torch.from_numpy(asked.places)].masked_fill(torch.from_numpy(~bits[:, :vocab_size]), -torch.inf)
    expected = choose_by_torch(masked, asked._replace(places=np.arange(5)))
    assert choose_by_torch(logits, asked, allowed) == expected
    assert found == expected
    assert all(
        bits[row, token] if token != NO_TOKEN else not bits[row, :vocab_size].any() for row, token in enumerate(found)
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 2, 7, 255, 257, 5000, 49152]),
    spread=st.sampled_from([0.0, 0.5, 2.5, 20.0]),
)
def test_further_tokens_are_what_would_be_chosen_without_those_before(
    seed: int, vocab_size: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal((4, vocab_size)) * spread).round(2)
    values[:, generator.integers(0, vocab_size, vocab_size // 5)] = -np.inf
    values[:, -1] = spread
    logits = torch.from_numpy(values.astype(np.float32))
    asked = Choices(
        np.arange(4), np.array([0.0, 0.3, 1.0, 1.5]), np.zeros(4, np.int64), np.ones(4), generator.random(4)
    )
    chosen, uniforms = np.array(choose_tokens(logits, asked)), generator.random((4, 9))
    before = logits.clone()
    for row, further in enumerate(choose_further_tokens(logits, asked, chosen, uniforms)):
        rest, taken, num_misses = before[row : row + 1].clone(), [int(chosen[row])], 0
        weights = ((rest[0].double() - rest.max()) / max(float(asked.temperature[row]), 1e-3)).exp()
        for token, u in zip(further, uniforms[row], strict=False):
            rest[0, taken] = -np.inf
            again = asked._replace(places=np.zeros(1, np.int64), temperature=asked.temperature[row : row + 1])
            again = again._replace(top_k=asked.top_k[:1], top_p=asked.top_p[:1], uniforms=np.array([u]))
            num_misses += choose_by_torch(rest, again) != [token]
            assert token not in taken
            assert rest[0, token] > -np.inf
            taken.append(token)
        assert num_misses <= (vocab_size >= 5000)
        if len(taken) < 10:  # as many as there are, or hardly anything is left
            weights[taken] = 0
            assert float(weights.sum()) <= 2e-6 * vocab_size
    assert torch.equal(logits, before)
    of_torch = [list(_further_by_torch(before[i].clone(), t, int(chosen[i]), list(uniforms[i]))) for i, t in
                enumerate(asked.temperature)]  # fmt: skip
    of_kernel = choose_further_tokens(logits, asked, chosen, uniforms)
    assert [list(row) for row in of_kernel] == of_torch


def test_draws_of_many_rows_are_as_frequent_as_their_probabilities() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)) * 2
    draws = 40_000
    u = np.random.default_rng(0).random(draws)
    ones = np.ones(draws)
    asked = Choices(np.zeros(draws, np.int64), ones, np.zeros(draws, np.int64), ones, u)
    found = np.bincount(choose_tokens(logits, asked), minlength=3000) / draws
    expected = logits.double().softmax(-1)[0].numpy()
    likely = expected > 1e-3
    assert np.abs(found - expected)[likely].max() < 4 * np.sqrt(expected.max() / draws)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 299, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_chooses_nothing_wherever_it_stands(
    bad: float, place: int, temperature: float
) -> None:
    logits = torch.zeros(3, 301)
    logits[1, place] = bad
    three = np.full(3, temperature)
    asked = Choices(np.arange(3), three, np.zeros(3, np.int64), np.full(3, 0.5), np.full(3, 0.1))
    for choose in (choose_tokens, choose_by_torch):
        tokens = choose(logits, asked)
        assert tokens[1] == NO_TOKEN
        assert tokens[0] == tokens[2] != NO_TOKEN
