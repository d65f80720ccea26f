"""Reasoning is split from what follows it, wherever an answer is cut, and grammars begin behind it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import completion_of, make_engine, prompts, serve
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.reasoning import AnswerTokens, is_begun_by, is_open_in, split_reasoning
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

MARKERS = ("<think>", "</think>")
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=12)


@given(reasoning=WORDS, completion=WORDS, blank=st.sampled_from(["", "\n", "\n\n"]))
def test_what_stands_between_the_markers_is_reasoning(reasoning: str, completion: str, blank: str) -> None:
    text = f"{blank}<think>{blank}{reasoning}{blank}</think>{blank}{completion}"
    assert split_reasoning(text, MARKERS) == (reasoning.strip(), completion.lstrip())
    begun = f"{blank}{reasoning}</think>{blank}{completion}"
    assert split_reasoning(begun, ("", "</think>")) == (reasoning.strip(), completion.lstrip())
    assert split_reasoning(f"<think>{reasoning}", MARKERS) == (reasoning.strip(), "")
    assert split_reasoning(completion, MARKERS) == (None, completion)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, "")),
        ("<thi", (None, "<thi")),
        ("<think>a</thi", ("a</thi", "")),
        ("so</think>42", (None, "so</think>42")),
        ("Well <think>a</think>b", (None, "Well <think>a</think>b")),
        ("<think></think>\n\nb", ("", "b")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
    ],
)
def test_only_an_answer_that_begins_with_the_start_marker_has_reasoning(text: str, expected: Any) -> None:
    assert split_reasoning(text, MARKERS) == expected


def test_prompts_and_open_messages_that_have_begun_reasoning() -> None:
    assert is_begun_by("user: hi\nassistant: <think>\n", "<think>")
    assert not is_begun_by("user: what is <think>?\nassistant:", "<think>")
    assert not is_begun_by("assistant: <think>\n\n</think>\n\n", "<think>")
    assert not is_begun_by("assistant:", "")
    assert is_open_in("<think>Let me see", MARKERS)
    assert not is_open_in("<think>Seen.</think>It is", MARKERS)
    assert not is_open_in("It is", MARKERS)


@pytest.fixture(scope="module", params=["text", "added", "special"])
def folder(request: pytest.FixtureRequest, weightless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which the markers are several tokens, one each, or one each that completions do not show."""
    target = tmp_path_factory.mktemp(request.param) / "model"
    shutil.copytree(weightless_model, target)
    if request.param != "text":
        backend = TokenizerFile.from_file(str(target / "tokenizer.json"))
        added = [AddedToken(text, special=request.param == "special", normalized=False) for text in MARKERS]
        (backend.add_special_tokens if request.param == "special" else backend.add_tokens)(added)
        backend.save(str(target / "tokenizer.json"))
    return target


def finished(folder: Path, text: str, num_tokens: int | None = None, **options: Any) -> Result:
    """What is said of a row that generates this text, or its first tokens."""
    token_ids = Tokenizer.from_folder(folder).encode_batch([text], is_rendered=True)[0][:num_tokens]
    sampling = SamplingParams(max_tokens=len(token_ids), **{"reasoning_markers": ",".join(MARKERS)} | options)
    completion, row = completion_of(folder), Sequence(Request("r", (5,), None, sampling))
    row.mode, result = "base", None
    for token in token_ids:
        row.token_ids.append(token)
        result = completion.finish(row)
        if result is not None:
            return result
    raise AssertionError(f"{text!r} does not end")


def test_a_row_is_split_however_its_markers_are_tokens(folder: Path) -> None:
    whole = "<think>\nLet me see, é.\n</think>\n\nIt is 42. "
    result = finished(folder, f"{whole}<|im_end|>")
    assert (result.reasoning, result.text, result.finish_reason) == ("Let me see, é.", "It is 42. ", "stop")
    begun = finished(folder, f"{whole.removeprefix('<think>')}<|im_end|>", reasoning_markers=",</think>")
    assert (begun.reasoning, begun.text) == (result.reasoning, result.text)
    stopped = finished(folder, f"{whole}<|im_end|>", stop=("42",))
    assert (stopped.reasoning, stopped.text) == ("Let me see, é.", "It is ")
    inside = finished(folder, f"{whole}<|im_end|>", stop=("see",))
    assert (inside.reasoning, inside.text, inside.finish_reason) == ("Let me", "", "stop")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    called = finished(folder, f"<think>{call}{call}</think>{call}<|im_end|>", tool_call_parser="hermes")
    assert (called.text, len(called.tool_calls or ())) == (call, 1)


def test_a_row_that_is_cut_while_it_reasons_has_no_completion(folder: Path) -> None:
    text = "<think>one two</think>three"
    num_tokens = len(Tokenizer.from_folder(folder).encode_batch([text], is_rendered=True)[0])
    for cut in range(1, num_tokens):
        result = finished(folder, text, cut)
        assert result.finish_reason == "length"
        if result.reasoning is None:
            assert MARKERS[0].startswith(result.text)
        elif result.text:
            assert (result.reasoning, "three".startswith(result.text)) == ("one two", True)
        else:
            assert "one two</think>".startswith(result.reasoning)


@settings(max_examples=40)
@given(reasoning=WORDS, completion=WORDS, cut=st.integers(0, 60))
def test_tokens_of_the_answer_are_those_behind_the_marker_however_they_arrive(
    folder: Path, reasoning: str, completion: str, cut: int
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    pieces = [f"<think>{reasoning}</think>", completion]
    token_ids = [token for ids in tokenizer.encode_batch(pieces, is_rendered=True) for token in ids]
    start = tokenizer.encode_batch(["<think>"], is_rendered=True)[0]
    whole, moved = AnswerTokens(tokenizer, MARKERS), AnswerTokens(tokenizer, MARKERS)
    at_once = whole.add(token_ids)
    if token_ids[: len(start)] != start:
        return  # "<think>" and what follows are tokenised otherwise: no start that a grammar offers
    one_by_one = [token for given in (token_ids[:cut], token_ids[cut:]) for token in moved.add(given)]
    assert tokenizer.decode(at_once) == completion
    assert one_by_one == at_once
    assert not whole.is_reasoning
    assert whole.start_token is None


def test_text_of_the_token_that_ends_the_reasoning_is_followed_by_no_grammar(weightless_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(weightless_model)
    (token,) = tokenizer.encode_batch(["the"], is_rendered=True)[0]
    assert AnswerTokens(tokenizer, ("", "t")).add([token, token]) == [token]
    assert split_reasoning("thethe", ("", "t")) == ("", "hethe")


REGEX = r"[a-c]{2,5}(-[0-9]+)?"


def rows(count: int, markers: str) -> list[Request]:
    """Rows that reason, if at all, up to a letter that random models write soon."""
    options = {"max_tokens": 120, "temperature": 1.5, "regex": REGEX, "reasoning_markers": markers}
    return [
        Request(f"row-{i}", prompt, None, SamplingParams(**options), i) for i, prompt in enumerate(prompts(count, 300))
    ]


def answers(results: dict[str, Result]) -> dict[str, tuple[Any, ...]]:
    return {name: (r.reasoning, r.text, r.finish_reason, r.token_ids) for name, r in results.items()}


@pytest.mark.parametrize("markers", [",e", "t,e", "th,e"])
def test_a_grammar_begins_behind_the_reasoning(tiny_llama: Path, markers: str) -> None:
    results = list(serve(make_engine(tiny_llama, "exact"), rows(40, markers)).values())
    assert {result.error for result in results} == {None}
    ended = [result for result in results if result.finish_reason == "stop"]
    assert len(ended) >= 20
    assert all(re.fullmatch(REGEX, result.text) for result in ended), [result.text for result in ended]
    # Where the prompt has not begun it, a row may answer at once.
    num_reasoned = sum(result.reasoning is not None for result in ended)
    assert num_reasoned == len(ended) if markers == ",e" else num_reasoned > 0
    assert all("e" not in (result.reasoning or "") for result in ended)


@pytest.mark.parametrize("markers", [",e", "t,e"])
def test_a_row_that_moves_while_it_reasons_goes_on_as_if_it_had_stayed(tiny_llama: Path, markers: str) -> None:
    given = rows(16, markers)
    stayed = answers(serve(make_engine(tiny_llama, "exact"), given))
    for num_steps in (4, 12, 30):
        one, other = make_engine(tiny_llama, "exact"), make_engine(tiny_llama, "exact")
        one.add(given)
        found: dict[str, Result] = {}
        for _ in range(num_steps):
            found |= {result.request_id: result for result in one.step()}
        other.import_rows(one.export_rows([row.request_id for row in given]))
        while other.num_unfinished:
            found |= {result.request_id: result for result in other.step()}
        assert answers(found) == stayed


def test_schemas_follow_reasoning_and_plain_rows_are_split_beside_them(tiny_llama: Path) -> None:
    schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                         "additionalProperties": False})  # fmt: skip
    sampling = SamplingParams(max_tokens=150, temperature=1.5, reasoning_markers=",e")
    constrained = SamplingParams(max_tokens=150, temperature=1.5, reasoning_markers=",e", json_schema=schema)
    given = [
        Request(str(i), prompt, None, (sampling, constrained)[i % 2], i) for i, prompt in enumerate(prompts(20, 300))
    ]
    results = serve(make_engine(tiny_llama), given)
    ended = [r.text for name, r in results.items() if int(name) % 2 and r.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text)["ok"], bool) for text in ended)
    assert any(r.reasoning for name, r in results.items() if not int(name) % 2)
