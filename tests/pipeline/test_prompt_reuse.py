"""Which part of all prompts nobody computed: counted by rows, added up by shards."""

from __future__ import annotations

from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.pipeline.prompt_reuse import PromptReuse
from lorabatch.pipeline.row_answer import RowAnswer, decode_journal, encode_answers


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
