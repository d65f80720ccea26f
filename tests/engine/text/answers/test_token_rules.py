"""What rows ask of their next token: the numbers of transformers' processors and of OpenAI's formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import make_engine, prompts, serve
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.sampler import sample
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.token_rules import TokenRules
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizers

VOCAB = 300
INF = math.inf


@pytest.fixture(scope="module")
def tokenizers(weightless_model: Path) -> Tokenizers:
    return Tokenizers(weightless_model, lambda adapter_id: None, (2,))


@pytest.fixture(scope="module")
def rules(tokenizers: Tokenizers) -> TokenRules:
    return TokenRules(tokenizers)


def changed(rules: TokenRules, logits: Tensor, prompt: list[int], tokens: list[int], **sampling: Any) -> Tensor:
    row = Sequence(Request("row", tuple(prompt), None, SamplingParams(**sampling)), list(tokens))
    found = logits.clone()[None]
    rules.apply_(found, [row])
    rules.forget(row)
    return found[0]


def processed(processor: LogitsProcessor, logits: Tensor, ids: list[int]) -> Tensor:
    found: Tensor = processor(torch.tensor([ids]), logits.clone()[None])[0]
    return found


def bad_word_ids(tokenizers: Tokenizers, words: tuple[str, ...]) -> list[list[int]]:
    texts = [text for word in words for text in (word, " " + word)]
    return [ids for ids in tokenizers.of(None).encode_batch(texts, is_rendered=True) if ids]


tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1)
bad_words = st.lists(st.sampled_from(["the", "fox", "naïve", "漢字", "z"]), min_size=1).map(tuple)
#: Options, and the processor that does the same.
ORACLES: dict[str, Callable[[Any], tuple[dict[str, Any], Callable[[Tokenizers], LogitsProcessor]]]] = {
    "repetition": lambda draw: (
        {"repetition_penalty": (penalty := draw(st.floats(0.3, 3)))},
        lambda _: RepetitionPenaltyLogitsProcessor(penalty),
    ),
    "bias": lambda draw: (
        {"logit_bias": tuple(sorted((bias := draw(biases)).items()))},
        lambda _: SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
    ),
    "bad words": lambda draw: (
        {"bad_words": (words := draw(bad_words))},
        lambda tokenizers: NoBadWordsLogitsProcessor(bad_word_ids(tokenizers, words)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLES)
@given(data=st.data(), prompt=tokens, generated=tokens, seed=st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_logits_are_those_of_transformers(
    name: str, rules: TokenRules, tokenizers: Tokenizers, data: st.DataObject, prompt: list[int], generated: list[int],
    seed: int,
) -> None:  # fmt: skip
    vocab_size = 49152 if name == "bad words" else VOCAB
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    options, make = ORACLES[name](data.draw)
    if name == "bad words":
        ids = data.draw(st.sampled_from(bad_word_ids(tokenizers, options["bad_words"])))
        generated = [*generated, *ids[: data.draw(st.integers(0, len(ids)))]]
    found = changed(rules, logits, prompt, generated, **options)
    # transformers knows no completion: words that began in the prompt count there
    expected = processed(make(tokenizers), logits, generated if name == "bad words" else prompt + generated)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@given(min_p=st.floats(0.001, 1), temperature=st.floats(0.1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_min_p_leaves_the_tokens_that_transformers_leaves(
    rules: TokenRules, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    found = changed(rules, logits, [1], [], min_p=min_p, temperature=temperature)
    scaled = processed(TemperatureLogitsWarper(temperature), logits, [1])
    expected = processed(MinPLogitsWarper(min_p), scaled, [1])
    ratios = (scaled.softmax(-1) / scaled.softmax(-1).max() - min_p).abs()
    assert (found.isfinite() == expected.isfinite())[ratios > 1e-5].all()


@given(
    presence=st.floats(-2, 2), frequency=st.floats(-2, 2), prompt=tokens, generated=tokens, seed=st.integers(0, 2**32)
)
@settings(max_examples=examples(60), deadline=None)
def test_penalties_of_presence_and_frequency_are_openais(
    rules: TokenRules, presence: float, frequency: float, prompt: list[int], generated: list[int], seed: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    found = changed(rules, logits, prompt, generated, presence_penalty=presence, frequency_penalty=frequency)
    for token in range(VOCAB):
        count = generated.count(token)
        expected = float(logits[token]) - count * frequency - (count > 0) * presence
        assert float(found[token]) == pytest.approx(expected, abs=1e-5)


def test_only_allowed_tokens_are_left(rules: TokenRules) -> None:
    found = changed(rules, torch.zeros(VOCAB), [1], [], allowed_token_ids=(7, 3))
    assert found.isfinite().nonzero().flatten().tolist() == [3, 7]


def test_ends_are_withheld_until_min_tokens(rules: TokenRules) -> None:
    for num_tokens, is_withheld in ((0, True), (1, True), (2, False)):
        found = changed(rules, torch.zeros(VOCAB), [1], [9] * num_tokens, min_tokens=2, stop_token_ids=(5,))
        assert [bool(found[token] == -INF) for token in (2, 5, 7)] == [is_withheld, is_withheld, False]


def test_a_row_is_changed_by_its_own_options_alone(rules: TokenRules) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    options: list[dict[str, Any]] = [{}, {"repetition_penalty": 2.0, "bad_words": ("the",)}, {"regex": "[ab]+"}]
    together = [Sequence(Request(f"{i}", (4, 5), None, SamplingParams(**o)), [8, 9]) for i, o in enumerate(options)]
    found = logits.clone()
    rules.apply_(found, together)
    assert torch.equal(found[0], logits[0])
    for i in (1, 2):
        assert torch.equal(found[i], changed(rules, logits[i], [4, 5], [8, 9], **options[i]))


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (5, 6, 7, 290)},
        {"logit_bias": ((17, 100.0), (18, 100.0))},
        {"stop_token_ids": tuple(range(3, 200))},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.7, "min_p": 0.02},
    ],
)
def test_an_engine_applies_them_and_a_row_that_moves_goes_on_as_if_it_had_stayed(
    tiny_llama: Path, options: dict[str, Any]
) -> None:
    rows = [
        Request(f"{i}", prompt, None, SamplingParams(max_tokens=12, temperature=float(i % 2), **options), i)
        for i, prompt in enumerate(prompts(12, VOCAB))
    ]
    stayed = serve(make_engine(tiny_llama, "exact"), rows)
    free = [replace(row, sampling=SamplingParams(max_tokens=12, temperature=row.sampling.temperature)) for row in rows]
    plain = serve(make_engine(tiny_llama, "exact"), free)
    assert {n: r.token_ids for n, r in stayed.items()} != {n: r.token_ids for n, r in plain.items()}
    one, other = make_engine(tiny_llama, "exact"), make_engine(tiny_llama, "exact")
    one.add(rows)
    found = {result.request_id: result for _ in range(5) for result in one.step()}
    other.import_rows(one.export_rows([row.request_id for row in rows]))
    while other.num_unfinished:
        found |= {result.request_id: result for result in other.step()}
    assert {n: (r.text, r.token_ids) for n, r in found.items()} == {n: (r.text, r.token_ids) for n, r in stayed.items()}
    if "allowed_token_ids" in options:
        assert {token for result in stayed.values() for token in result.token_ids} <= {5, 6, 7, 290}
    if "stop_token_ids" in options:
        ended = [result for result in stayed.values() if result.finish_reason == "stop"]
        assert ended
        assert all(3 <= result.token_ids[-1] < 200 for result in ended)


def test_tokens_that_are_checked_after_they_were_chosen_are_those_of_a_mask(tokenizers: Tokenizers) -> None:
    """Greedy ones are the same; draws have the same distribution."""
    vocab_size = tokenizers.of(None).vocab_size
    spread = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    likely = spread.clone()
    likely[[tokenizers.of(None).encode_batch([text], is_rendered=True)[0][0] for text in ("a", "b", "x", "Y")]] = 14.0
    # allowed tokens are far behind those that are tried, or among them
    for logits, temperature in product((spread, likely), (0.0, 1.0)):
        sampling = SamplingParams(temperature=temperature, regex="[a-e]{1,3}")
        rows = [Sequence(Request(f"{i}", (1,), None, sampling, i)) for i in range(6000 if temperature else 1)]
        masked = logits.clone()[None]
        TokenRules(tokenizers).apply_(masked, rows[:1])
        expected = masked[0].softmax(-1)
        found = sample(logits.repeat(len(rows), 1), rows, TokenRules(tokenizers)).ids
        if temperature == 0.0:
            assert found == [int(expected.argmax())]
            continue
        frequencies = torch.bincount(torch.tensor(found), minlength=vocab_size) / len(rows)
        assert (frequencies[expected == 0] == 0).all()
        assert (frequencies - expected).abs().max() < 0.03


def test_draws_follow_what_is_left(rules: TokenRules) -> None:
    logits = torch.zeros(2000, VOCAB)
    logits[:, 5] = logits[:, 6] = 9.0
    sampling = SamplingParams(temperature=1.0, min_p=0.5, logit_bias=((6, -0.5),))
    rows = [Sequence(Request(f"{i}", (1,), None, sampling, i)) for i in range(2000)]
    drawn = sample(logits, rows, rules).ids
    assert set(drawn) == {5, 6}
    assert drawn.count(6) / 2000 == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.05)
