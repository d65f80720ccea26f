"""What a row overrides survives its journey, and nothing else travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import SamplingParams
from lorabatch.engine.text.answers.choices import MOST_TOKENS
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.pipeline.dataset.row_checks import (
    RowDraft,
    check_choice_size,
    read_sampling,
    row_sampling,
    sampling_overrides,
)

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**40),
    min_tokens=st.integers(0, 9),
    temperature=st.floats(0, 4, allow_nan=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    logprobs=st.booleans(),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
    bad_words=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    choice=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    reasoning_markers=st.sampled_from(["", "<think>,</think>", ",x"]),
    tool_call_parser=st.sampled_from(["", "hermes"]),
)


@given(job=PARAMS, row=PARAMS)
def test_overrides_read_back_give_the_rows_own_sampling(job: SamplingParams, row: SamplingParams) -> None:
    assert row_sampling(job, sampling_overrides(job, row)) == row


@given(job=PARAMS)
def test_a_row_that_overrides_nothing_carries_nothing(job: SamplingParams) -> None:
    assert sampling_overrides(job, replace(job)) is None


JOB = SamplingParams(max_tokens=9, json_schema='{"type": "object"}')


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"regex": None, "choice": None}, JOB),
        ({"regex": "a+"}, replace(JOB, json_schema="", regex="a+")),
        ({"choice": "yes"}, replace(JOB, json_schema="", choice=("yes",))),
        ({"choice": ["yes", "no"], "response_format": None}, replace(JOB, json_schema="", choice=("yes", "no"))),
        ({"response_format": '{"type": "text"}'}, replace(JOB, json_schema="")),
        ({"structured_outputs": {"regex": "b", "choice": None}}, replace(JOB, json_schema="", regex="b")),
        ({"logit_bias": [(5, 1.0), (3, -2)]}, replace(JOB, logit_bias=((3, -2.0), (5, 1.0)))),
        ({"logit_bias": '{"5": 1}'}, replace(JOB, logit_bias=((5, 1.0),))),
        ({"stop_token_ids": 7}, replace(JOB, stop_token_ids=(7,))),
        ({"temperature": 1}, replace(JOB, temperature=1.0)),
    ],
)
def test_a_row_s_own_values_take_the_place_of_the_job_s(values: dict[str, Any], expected: SamplingParams) -> None:
    assert read_sampling(JOB, values, vocab_size=100) == (expected, [])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex, choice: expected at most one"),
        ({"regex": "a", "response_format": '{"type": "text"}'}, "regex, response_format: expected at most one"),
        ({"response_format": "{"}, "response_format: not JSON"),
        (
            {"response_format": '{"type": "json_schema", "json_schema": {"schema": {"uniqueItems": true}}}'},
            "uniqueItems",
        ),
        ({"logit_bias": '{"x": 1}'}, "logit_bias: expected a JSON object of tokens and numbers"),
        ({"logit_bias": '{"5": 101}'}, "numbers from -100 to 100"),
        ({"allowed_token_ids": [5, 100]}, "token 100 of the sampling options: expected tokens up to 99"),
        ({"min_p": 1.5}, "min_p=1.5: expected from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: expected a positive"),
    ],
)
def test_a_row_s_wrong_values_are_named(values: dict[str, Any], named: str) -> None:
    _, problems = read_sampling(JOB, values, vocab_size=100)
    assert len(problems) == 1
    assert named in problems[0]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (("yes", "no", "x" * 50), None),
        (("yes", "q" * 40_000), "40000 characters are more tokens than the context of 512 tokens. Shorten the text"),
        (("yes", "ab" * 300), "together more than the context of 512 tokens. Shorten the text or the prompt"),
        (tuple(f"{i} " + "z" * 400 for i in range(200)), f"expected at most {MOST_TOKENS}. Give fewer or shorter ones"),
    ],
    ids=["short", "long", "beyond the prompt", "many"],
)
def test_texts_of_a_choice_are_bounded_by_the_context_before_a_tree_is_built(
    choice: tuple[str, ...], said: str | None, weightless_model: Path
) -> None:
    draft = RowDraft("a", SamplingParams(choice=choice), tokens=[5, 6, 7])
    check_choice_size(draft, Tokenizer.from_folder(weightless_model), 512)
    assert (said in draft.problems[0]) if said else not draft.problems
