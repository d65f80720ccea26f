"""Where completions end: stop tokens, stop strings however they were tokenised, `min_tokens` and `max_tokens`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import completion_of

from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.completion import Completion, first_stop
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

EOS, START = 2, 1  # <|im_end|>, <|im_start|>
TEXTS = ("naïve café – 漢字 😀😀 end\n\n", "the quick brown fox ", "aabaaab", "e\u0301\u200d👩‍👩‍👧 ", "London. London")


@pytest.fixture(scope="module")
def completion(weightless_model: Path) -> Completion:
    return completion_of(weightless_model)


@pytest.fixture(scope="module")
def tokenizer(weightless_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(weightless_model)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text], is_rendered=False)[0]


def play(completion: Completion, token_ids: list[int], sampling: SamplingParams, num_before: int = 0) -> Result | None:
    """Append one token after the other until the row ends; `num_before` of them came from another engine."""
    row = Sequence(Request("row", (5,), None, sampling), list(token_ids[:num_before]), mode="base")
    result = None
    for token_id in token_ids[num_before:]:
        row.token_ids.append(token_id)
        result = completion.finish(row)
        if result is not None:
            break
    completion.forget(row)
    return result


def by_character(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string to be complete, read one character after the other."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    text = "".join(draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4)))
    stops = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text) - 1))
        stop = text[start : start + draw(st.integers(1, 6))]
        stops.append(draw(st.sampled_from((stop, stop + "x", "never"))))
    return text, tuple(stops)


@settings(max_examples=300, deadline=None)
@given(texts_and_stops(), st.randoms(use_true_random=False), st.integers(0, 4))
def test_the_first_stop_string_to_be_complete_ends_the_text_however_it_was_tokenised(
    completion: Completion, tokenizer: Tokenizer, case: tuple[str, tuple[str, ...]], rng, num_before: int
) -> None:
    text, stops = case
    # tokens of pieces, some of them single bytes of a character
    token_ids: list[int] = []
    while text_left := text[len(tokenizer.decode(token_ids)) :]:
        piece = encoded(tokenizer, text_left[: rng.randrange(1, 9)])
        token_ids += piece
    expected = by_character(text, stops)
    sampling = SamplingParams(max_tokens=len(token_ids), stop=stops)
    # what another engine has generated did not hold a stop string
    before = min(num_before, len(token_ids) - 1)
    if by_character(tokenizer.decode(token_ids[:before]), stops) is not None:
        before = 0
    result = play(completion, token_ids, sampling, before)
    assert result is not None
    assert (result.text, result.finish_reason) == ((text, "length") if expected is None else (expected, "stop"))


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    assert first_stop("one two", ("two", "e two", "o"), 0) == 0  # "o" is complete first
    assert first_stop("xx two", ("two", "x two"), 0) == 1
    assert first_stop("abcd", ("abcd", "bc"), 0) == 1  # "bc" is complete before "abcd"


def test_a_stop_string_that_was_complete_before_min_tokens_does_not_end_the_row_later(
    completion: Completion, tokenizer: Tokenizer
) -> None:
    token_ids = [t for letter in "abcdefgb!" for t in encoded(tokenizer, letter)]
    sampling = SamplingParams(max_tokens=9, min_tokens=5, stop=("b", "nothing like it"))
    result = play(completion, token_ids, sampling)
    assert result is not None
    assert (result.text, len(result.token_ids)) == ("abcdefg", 8)


def test_a_stop_string_before_an_unfinished_character_is_found_when_tokens_run_out(
    completion: Completion, tokenizer: Tokenizer
) -> None:
    whole = encoded(tokenizer, "a漢")
    result = play(completion, [*whole[:-1]], SamplingParams(max_tokens=len(whole) - 1, stop=("a\ufffd",)))
    assert result is not None
    assert (result.text, result.finish_reason) == ("", "stop")


def test_a_special_token_given_as_stop_string_ends_the_row(completion: Completion, tokenizer: Tokenizer) -> None:
    token_ids = [*encoded(tokenizer, "the fox"), START, *encoded(tokenizer, " dog")]
    sampling = SamplingParams(max_tokens=50, stop=("<|im_start|>",), ignore_eos=True)
    result = play(completion, token_ids, sampling)
    assert result is not None
    assert (result.text, result.finish_reason, result.token_ids[-1]) == ("the fox", "stop", START)
    row = Sequence(Request("row", (5,), None, sampling))
    assert set(completion._tokenizers.stop_tokens(row.request)) == {START, EOS}


def test_a_stop_token_ends_the_row_after_min_tokens_unless_it_is_ignored(
    completion: Completion, tokenizer: Tokenizer
) -> None:
    token_ids = [*encoded(tokenizer, "x"), EOS, *encoded(tokenizer, "y"), EOS]
    for sampling, text in (
        (SamplingParams(max_tokens=9), "x"),
        (SamplingParams(max_tokens=9, min_tokens=2), "xy"),
        (SamplingParams(max_tokens=4, ignore_eos=True), "xy"),
    ):
        result = play(completion, token_ids, sampling)
        assert result is not None
        assert (result.text, result.finish_reason) == (text, "length" if sampling.ignore_eos else "stop")


def test_rows_of_an_adapter_with_its_own_tokenizer_end_by_it(weightless_model: Path, tmp_path: Path) -> None:
    for file in weightless_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config.replace('"<|im_end|>"', '"<|im_start|>"'))
    asked: list[str] = []

    def own_tokenizer(adapter_id: str) -> Tokenizer | None:
        asked.append(adapter_id)
        return Tokenizer.from_folder(tmp_path) if adapter_id == "own" else None

    completion = completion_of(weightless_model, own_tokenizer)
    tokenizers = completion._tokenizers
    for adapter_id, expected in (("own", {START, EOS}), ("other", {EOS}), (None, {EOS})):
        row = Sequence(Request("row", (5,), adapter_id, SamplingParams(max_tokens=9)), [7], mode="base")
        assert completion.finish(row) is None
        assert set(tokenizers.stop_tokens(row.request)) == expected
        row.token_ids.append(START)
        assert (completion.finish(row) is not None) == (adapter_id == "own")
    assert asked == ["own", "other"], "a tokenizer is asked for once, not at every token"
