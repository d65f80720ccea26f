"""Hashes that must be the same on every machine and in every later version."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import SamplingParams
from lorabatch.pipeline.dataset.fingerprints import id_hash, prefix_hash, row_fingerprint, shared_tokens, task_hash

OTHER: dict[str, Any] = {
    "teacher_top_k": 4,
    "max_tokens": 7,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 9,
    "stop": ("x",),
    "logprobs": True,
    "ignore_eos": True,
    "top_logprobs": 2,
    "prompt_logprobs": True,
    "prompt_top_logprobs": 3,
    "stop_token_ids": (5,),
    "n": 2,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": ((5, 1.0),),
    "bad_words": ("x",),
    "allowed_token_ids": (5,),
    "continuation_token_ids": (5,),
    "json_schema": "{}",
    "regex": "x",
    "choice": ("x",),
    "score_choices": False,
    "grammar": 'start: "x"',
    "reasoning_markers": "<think>,</think>",
    "tool_call_parser": "hermes",
    "task": "embed",
    "pooling": "mean",
    "normalize_embeddings": False,
}


def test_hashes_are_what_they_were_when_jobs_were_first_written() -> None:
    assert row_fingerprint("row-1", [1, 2, 3], SamplingParams()).hex() == "1cd8e7cbe513e9a656acb3db9eaf7485"
    assert id_hash("row-1") == 8044599923234933529
    assert prefix_hash(range(64)) == 3678511507499414395


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_sampling_parameter_counts(name: str) -> None:
    plain = SamplingParams()
    assert row_fingerprint(1, [1], replace(plain, **{name: OTHER[name]})) != row_fingerprint(1, [1], plain)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=4), other=st.lists(st.integers(0, 2**31 - 1), max_size=4))
def test_prompts_count_token_by_token(tokens: list[int], other: list[int]) -> None:
    same = row_fingerprint("a", tokens, SamplingParams()) == row_fingerprint("a", other, SamplingParams())
    assert same == (tokens == other)


def test_a_number_and_its_text_are_two_ids_and_no_id_is_none() -> None:
    assert id_hash(1) != id_hash("1")
    assert id_hash(None) == 0
    assert row_fingerprint(1, [1], SamplingParams()) != row_fingerprint("1", [1], SamplingParams())


@given(shared=st.lists(st.integers(0, 999), min_size=64, max_size=70), tail=st.lists(st.integers(0, 999), max_size=9))
def test_a_long_prompts_end_does_not_count_for_its_prefix(shared: list[int], tail: list[int]) -> None:
    assert prefix_hash([*shared, *tail]) == prefix_hash(shared[:64]) != 0


def test_short_prompts_meet_by_what_they_have() -> None:
    tokens = list(range(100, 164))
    assert prefix_hash(tokens[:31]) == prefix_hash(tokens[:16])
    assert prefix_hash(tokens[:63]) == prefix_hash(tokens[:32])
    assert prefix_hash(tokens[:15]) == 0


PROMPTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 300), max_size=6)), max_size=12)


def test_every_row_of_an_adapter_but_one_shares_the_systems_prompt() -> None:
    system = [7, 300, 2]
    prompts = [[*system, 1], [9, 9], [*system, 2, 5], [*system, 2, 6]]
    assert shared_tokens(["a"] * 4, prompts).tolist() == [0, 0, 3, 4]


def test_adapters_share_nothing_and_a_prompt_can_be_all_of_anothers_beginning() -> None:
    assert shared_tokens(["a", "b", None, ""], [[1, 2], [1, 2], [1], [1, 2]]).tolist() == [0, 0, 0, 1]
    assert shared_tokens([], []).tolist() == []


@given(PROMPTS)
def test_what_is_left_to_compute_are_the_nodes_of_the_tree_of_all_prompts(
    rows: list[tuple[str | None, list[int]]],
) -> None:
    adapters, prompts = [adapter for adapter, _ in rows], [prompt for _, prompt in rows]
    nodes = {(adapter, *prompt[: end + 1]) for adapter, prompt in rows for end in range(len(prompt))}
    assert sum(map(len, prompts)) - shared_tokens(adapters, prompts).sum() == len(nodes)


# Options by which answers end earlier or later, beside max_tokens.
ENDS_ANSWERS = {
    *("json_schema", "regex", "choice", "grammar", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("allowed_token_ids", "reasoning_markers", "tool_call_parser"),
}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_rows_are_of_another_task_where_an_option_ends_their_answers_otherwise(name: str) -> None:
    changed = replace(SamplingParams(), **{name: OTHER[name]})
    assert (task_hash(changed) != task_hash(SamplingParams())) == (name in ENDS_ANSWERS)


@pytest.mark.parametrize(
    "asked",
    [{"asked": "Label the review."}, {"asked": "Write a story."}, {"templates": (("user", "{{ question }}"),)}],
)
def test_rows_are_of_another_task_where_something_else_is_asked(asked: dict[str, Any]) -> None:
    assert task_hash(SamplingParams(), **asked) != task_hash(SamplingParams())
    assert task_hash(SamplingParams(), **asked) == task_hash(replace(SamplingParams(), seed=5, max_tokens=9), **asked)
