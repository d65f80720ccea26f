"""Calls that a model writes are read back as they are; whatever else it writes stays text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft_oracle import completion_of
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from lorabatch.engine.request import TOOL_CALL_PARSERS, Request, SamplingParams
from lorabatch.engine.sequence import Sequence
from lorabatch.engine.text.answers.tool_calls import parse_tool_calls
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", ";", '"}', "<|python_tag|>"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
NAMES = st.from_regex(r"[a-zA-Z_][\w.-]{0,8}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
BLANKS = st.text(" \n\t", max_size=2)
# Text around calls that begins none.
PROSE = st.text(st.characters(exclude_characters="<[", exclude_categories=["Cs"]), max_size=9)


def hermes(calls: list[tuple[str, Any]], before: str, blank: str) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return before + before.join(f"<tool_call>{blank}{text}{blank}</tool_call>" for text in objects) + before


def llama3(calls: list[tuple[str, Any]], before: str, blank: str) -> str:
    objects = [json.dumps({"type": "function", "name": name, "parameters": given}) for name, given in calls]
    return f"{blank}<|python_tag|>{blank}" + f"{blank};{blank}".join(objects) + blank


def mistral_list(calls: list[tuple[str, Any]], before: str, blank: str) -> str:
    objects = [{"name": name, "arguments": arguments, "id": "123456789"} for name, arguments in calls]
    return f"{before}[TOOL_CALLS]{blank}{json.dumps(objects, ensure_ascii=False)}{before}"


def mistral_named(calls: list[tuple[str, Any]], before: str, blank: str) -> str:
    texts = (f"[TOOL_CALLS]{blank}{name}{blank}[ARGS]{blank}{json.dumps(given)}{blank}" for name, given in calls)
    return before + "".join(texts)


FORMS = {
    "hermes": ("hermes", hermes),
    "llama3": ("llama3", llama3),
    "mistral, a list": ("mistral", mistral_list),
    "mistral, by name": ("mistral", mistral_named),
}


@pytest.mark.parametrize("form", FORMS)
@given(calls=CALLS, before=PROSE, blank=BLANKS)
def test_calls_that_are_written_are_read_back(form: str, calls: list[tuple[str, Any]], before: str, blank: str) -> None:
    parser, write = FORMS[form]
    found = parse_tool_calls(parser, write(calls, before, blank))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


PIECES = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "f", ',
    '"arguments": {}}', '"parameters": {"a": 1}}', '{"name":', "[", "]", "{", "}", ",", ";", '"', "\\", "\\ud800", "f",
    " ", "1e999", "NaN", "{}", "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20).map("".join))
def test_nothing_that_a_model_writes_raises_and_what_is_read_can_be_stored(parser: str, text: str) -> None:
    for name, arguments in parse_tool_calls(parser, text):
        assert name.encode()
        assert isinstance(json.loads(arguments), dict)
        arguments.encode()


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_nest_without_end_is_no_call(parser: str) -> None:
    for nest in ("[" * 100_000, '{"a":' * 100_000):
        for text in (nest, f"<tool_call>{nest}", f"[TOOL_CALLS]{nest}", f"[TOOL_CALLS]f[ARGS]{nest}"):
            assert parse_tool_calls(parser, text) == ()


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3", 'Sure: {"name": "f", "parameters": {}}'),
        ("llama3", '{"name": "f", "parameters": {}} is the call'),
        ("llama3", '{"name": "f", "arguments": {}}'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f"}'),
        ("llama3", ""),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]f[ARGS][]"),
        ("mistral", "[TOOL_CALLS]two words[ARGS]{}"),
    ],
)
def test_what_is_no_whole_call_stays_text(parser: str, text: str) -> None:
    assert parse_tool_calls(parser, text) == ()


def test_a_broken_call_costs_no_other() -> None:
    good = '<tool_call>{"name": "g", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert parse_tool_calls("hermes", f'<tool_call>{{"name": "f"</tool_call>{good}<tool_call>') == (
        ("g", '{"a": "</tool_call>"}'),
    )


@pytest.fixture(scope="module")
def folder(weightless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which the markers of calls are special tokens, which completions do not show."""
    target = tmp_path_factory.mktemp("special") / "model"
    shutil.copytree(weightless_model, target)
    backend = TokenizerFile.from_file(str(target / "tokenizer.json"))
    markers = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    backend.save(str(target / "tokenizer.json"))
    return target


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", 'Look:\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": "é"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "é"}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "é"}'),
    ],
)
@pytest.mark.parametrize("ending", ["", " STOP", "<|im_end|>"])
def test_markers_that_are_special_tokens_are_seen_and_the_completion_is_unchanged(
    folder: Path, parser: str, text: str, ending: str
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    token_ids = tokenizer.encode_batch([text + ending], is_rendered=True)[0]
    found = {}
    for name in (parser, ""):
        sampling = SamplingParams(max_tokens=len(token_ids), stop=(" STOP",), tool_call_parser=name)
        completion = completion_of(folder)
        row, result = Sequence(Request("row", (5,), None, sampling), mode="base"), None
        for token in token_ids:
            row.token_ids.append(token)
            result = completion.finish(row)
        assert result is not None
        found[name] = result
    assert found[parser].text == found[""].text == tokenizer.decode(token_ids).removesuffix(" STOP")
    assert found[parser].tool_calls == (("f", '{"a": "é"}'),)
    assert found[""].tool_calls is None
