"""Journals of answers: what was written whole is read, wherever the writing stopped.

Which part of all prompts was copied instead of computed: counted by rows, added up by shards.
"""

from __future__ import annotations

import struct
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.pipeline.dataset.answers import BegunRow, RowAnswer, decode_journal, encode_answers, encode_begun
from lorabatch.pipeline.messages import PromptReuse

FLOATS = st.floats(allow_nan=False, max_value=0)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
ANSWERS = st.builds(
    RowAnswer,
    fingerprint=st.binary(min_size=16, max_size=16),
    adapter_sha256=st.none() | st.text(max_size=4),
    completion=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    finish_reason=st.sampled_from(["stop", "length", "error"]),
    prompt_tokens=st.integers(0, 2**31 - 1),
    completion_tokens=st.integers(0, 2**31 - 1),
    mode=st.sampled_from([None, "base", "merged"]),
    attempts=st.integers(0, 9),
    error=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    token_ids=st.none() | TOKENS,
    token_logprobs=st.none() | st.lists(FLOATS, max_size=5).map(tuple),
    reasoning=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    tool_calls=st.none() | st.lists(st.tuples(st.just("a00000000"), st.just("f"), st.just("{}"))).map(tuple),
)


@given(batches=st.lists(st.lists(ANSWERS, max_size=4), max_size=3))
def test_answers_come_back_as_they_were_written(batches: list[list[RowAnswer]]) -> None:
    journal = b"".join(encode_answers(batch) for batch in batches)
    assert list(decode_journal(journal)) == [answer for batch in batches for answer in batch]


BEGUN = st.builds(
    BegunRow,
    fingerprint=st.binary(min_size=16, max_size=16),
    adapter_sha256=st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    token_ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=5).map(tuple),
    token_logprobs=st.lists(FLOATS, max_size=5).map(tuple),
)


@given(answers=st.lists(ANSWERS, max_size=3), begun=st.lists(BEGUN, max_size=3))
def test_begun_rows_stand_beside_answers(answers: list[RowAnswer], begun: list[BegunRow]) -> None:
    assert list(decode_journal(encode_answers(answers) + encode_begun(begun))) == [*answers, *begun]


@given(answers=st.lists(ANSWERS, min_size=1, max_size=4), data=st.data())
def test_a_torn_end_costs_the_last_answer_only(answers: list[RowAnswer], data: st.DataObject) -> None:
    journal = encode_answers(answers)
    last = len(encode_answers(answers[-1:]))
    cut = data.draw(st.integers(1, last))
    assert list(decode_journal(journal[:-cut])) == answers[:-1]


@given(answers=st.lists(ANSWERS, min_size=2, max_size=4), data=st.data())
def test_a_damaged_answer_and_all_after_it_are_not_believed(answers: list[RowAnswer], data: st.DataObject) -> None:
    journal = bytearray(encode_answers(answers))
    first = len(encode_answers(answers[:1]))
    place = data.draw(st.integers(first + struct.calcsize("<II"), len(journal) - 1))
    journal[place] ^= 0x55
    found = list(decode_journal(bytes(journal)))
    assert found == answers[: len(found)]
    assert 1 <= len(found) < len(answers)


def test_tokens_are_kept_only_where_the_row_asked_for_logprobs() -> None:
    result = Result("r", (4, 5), "text", "stop", 3, "unmerged", token_logprobs=(-0.1, -0.2))
    for asks in (True, False):
        request = Request("r", (1, 2, 3), "sha", SamplingParams(logprobs=asks))
        answer = RowAnswer.from_result(b"f" * 16, request, result, attempts=2)
        assert (answer.completion, answer.completion_tokens, answer.attempts) == ("text", 2, 2)
        assert answer.token_ids == ((4, 5) if asks else None)
        assert answer.token_logprobs == ((-0.1, -0.2) if asks else None)


def test_an_engines_error_leaves_no_completion() -> None:
    result = Result("r", (4,), "half a te", "error", 3, "base", error="the row killed two engines.")
    answer = RowAnswer.from_result(b"f" * 16, Request("r", (1,), None, SamplingParams()), result, attempts=1)
    assert (answer.completion, answer.error, answer.finish_reason) == (None, "the row killed two engines.", "error")


def make_answer(prompt_tokens: int, reused: int | None) -> RowAnswer:
    request = Request("r", (1,) * prompt_tokens, None, SamplingParams())
    result = Result("r", (2,), "b", "stop", prompt_tokens, "base", reused_prompt_tokens=reused)
    return RowAnswer.from_result(b"f" * 16, request, result, attempts=1)


def test_a_shard_counts_the_rows_of_which_it_is_known() -> None:
    answers = [make_answer(40, 0), make_answer(40, 32), make_answer(1000, None)]
    assert PromptReuse.of_answers(answers) == PromptReuse(80, 32)


def test_a_row_kept_in_a_journal_is_still_known() -> None:
    assert PromptReuse.of_answers(decode_journal(encode_answers([make_answer(40, 32)]))) == PromptReuse(40, 32)  # type: ignore[arg-type]


def test_shards_count_by_their_tokens() -> None:
    assert PromptReuse.total([PromptReuse(300, 240), PromptReuse(100, 0), PromptReuse()]).share == 0.6


def test_without_a_prompt_there_is_no_share() -> None:
    assert PromptReuse().share is None
    assert PromptReuse(10, 0).share == 0.0


@pytest.mark.parametrize("other", [[1, 2], {"fingerprint": b"x"}, 7, None, "text", {1: 2}])
def test_a_journal_ends_at_a_frame_of_another_shape(other: object) -> None:
    row = BegunRow(b"f" * 16, None, (1,), ())
    body = msgpack.packb(other)
    frame = struct.pack("<II", len(body), zlib.crc32(body)) + body
    assert list(decode_journal(encode_begun([row]) + frame + encode_begun([row]))) == [row]
