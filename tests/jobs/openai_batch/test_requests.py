"""One line of a batch file is a row, or says why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.openai_batch.requests import MAX_LINE_BYTES, BatchRequest, read_request
from lorabatch.system.untrusted import printable

from .batch_lines import MESSAGES, chat, completion


def read(value: Any, *base_models: str) -> BatchRequest:
    return read_request(value if isinstance(value, bytes) else json.dumps(value).encode(), base_models)


def problem(value: Any) -> str:
    request = read(value)
    assert request.columns == {}
    (found,) = request.problems
    return found


def test_a_request_of_a_chat_is_a_row_with_its_messages() -> None:
    found = read(chat(max_tokens=3, temperature=0.5))
    assert (found.custom_id, found.prompt_role, found.problems) == ("a", "messages", ())
    assert found.columns == {
        "adapter": "tenant",
        "openai_model": "tenant",
        "messages": json.dumps(MESSAGES),
        "max_tokens": 3,
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("prompt", "role", "value"),
    [
        ("hello", "prompt", "hello"),
        (["hello"], "prompt", "hello"),
        ([3, 4], "prompt_token_ids", [3, 4]),
        ([[3, 4]], "prompt_token_ids", [3, 4]),
        ([0], "prompt_token_ids", [0]),
    ],
)
def test_a_prompt_is_text_or_tokens(prompt: Any, role: str, value: Any) -> None:
    found = read(completion(prompt=prompt))
    assert (found.prompt_role, found.columns[role], found.problems) == (role, value, ())


def test_names_of_the_base_model_ask_for_no_adapter() -> None:
    found = [read(chat(model=name), "gpt-x", "base") for name in ("base", "tenant", "gpt-x")]
    assert [(row.columns["adapter"], row.columns["openai_model"]) for row in found] == [
        (None, "base"),
        ("tenant", "tenant"),
        (None, "gpt-x"),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"", "The line is no JSON object: Expecting value: line 1 column 1 (char 0)."),
        (b"custom_id,url\r\n", "The line is no JSON object: Expecting value: line 1 column 1 (char 0)."),
        (b"[1]", "The line is no JSON object: it holds list, expected an object."),
        (b'{"custom_id": "a"', "The line is no JSON object: Expecting ',' delimiter: line 1 column 18 (char 17)."),
        (b'{"a": NaN}', "The line is no JSON object: NaN is not a number."),
        (b'{"a": 1, "a": 2}', "The line is no JSON object: key 'a' is given twice."),
        (b'{"a": ' + b"[" * 100_000, "The line is no JSON object: it nests too deeply."),
        (b'{"a": 1' + b"0" * 100 + b"}", "The line is no JSON object: a number of 101 digits, expected at most 64."),
        (b'{"a": "\xff"}', "The line is not UTF-8 text at byte 7."),
        (b'\xef\xbb\xbf{"a": 1}', None),
        ('{"a": 1}'.encode("utf-16"), "The line is not UTF-8 text at byte 0."),
        (b"PAR1\x15\x04", "The line is no JSON object: Expecting value: line 1 column 1 (char 0)."),
    ],
)
def test_a_line_that_is_no_json_object_says_so(line: bytes, sentence: str | None) -> None:
    found = problem(line)
    assert found.startswith("The line is no JSON object: ") if sentence is None else found == sentence


def test_a_line_that_is_too_long_says_so() -> None:
    assert read_request(None, ()).problems == (
        f"The line has more than {MAX_LINE_BYTES >> 20} MiB. Shorten the request.",
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"custom_id": None}, "custom_id=null: expected text."),
        ({"custom_id": 7}, "custom_id=7: expected text."),
        ({"custom_id": ""}, "custom_id='': expected text."),
        ({"custom_id": "\ud800"}, "custom_id='\\ud800': expected text."),
        ({"method": "GET"}, "method='GET': expected POST."),
        ({"method": None}, "method=null: expected POST."),
        ({"url": "/v1/embeddings"}, "url='/v1/embeddings': expected /v1/chat/completions or /v1/completions."),
        ({"url": ["x"]}, "url=['x']: expected /v1/chat/completions or /v1/completions."),
        ({"body": "x"}, "body='x': expected an object."),
        ({"adapter": "x"}, "adapter: not a key of a request; expected custom_id, method, url, body."),
        ({"adapter": None}, None),
    ],
)
def test_what_is_wrong_around_the_body_is_said(change: dict[str, Any], sentence: str | None) -> None:
    if sentence is None:
        assert read(chat() | change).problems == ()
    else:
        assert problem(chat() | change) == sentence


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (chat(model=None), "model=null: expected the name of an adapter or of the base model."),
        (chat(model=["x"]), "model=['x']: expected the name of an adapter or of the base model."),
        (chat(model=""), "model='': expected the name of an adapter or of the base model."),
        (chat(messages=None), "messages=null: expected a list of messages."),
        (chat(messages="hello"), "messages='hello': expected a list of messages."),
        (completion(prompt=""), "prompt='': expected text or a list of token ids."),
        (completion(prompt=[]), "prompt=[]: expected text or a list of token ids."),
        (completion(prompt=[[]]), "prompt=[[]]: expected text or a list of token ids."),
        (completion(prompt=[1, True]), "prompt=[1, True]: expected text or a list of token ids."),
        (completion(prompt=[2**63]), f"prompt=[{2**63}]: expected text or a list of token ids."),
        (completion(prompt="\ud800"), "prompt='\\ud800': expected text or a list of token ids."),
        (completion(prompt=["a", "b"]), "prompt=['a', 'b']: expected one prompt. Write a request for each."),
        (completion(messages=MESSAGES), f"messages={MESSAGES}: not supported. Leave it out."),
        (chat(n=2, audio={}) | {"method": "GET"}, None),
    ],
)
def test_what_is_wrong_in_the_body_is_said_all_at_once(request_: dict[str, Any], sentence: str | None) -> None:
    if sentence is not None:
        assert problem(request_) == sentence
    else:
        found = read(request_)
        assert found.custom_id == "a"
        assert [text.partition("=")[0] for text in found.problems if "n=" not in text] == ["method", "audio"]


def test_a_long_model_name_is_no_adapter() -> None:
    assert problem(chat(model="a" * 513)).startswith("model='aaa")
    assert len(problem(chat(model="a" * 10_000))) < 200


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_infinite_numbers_in_messages_are_refused(text: str) -> None:
    line = json.dumps(chat(messages=["here"])).replace('"here"', text).encode()
    assert "no JSON that can be written" in problem(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(st.lists(json_values, max_size=4))
def test_messages_survive_whatever_is_in_them(messages: list[Any]) -> None:
    found = read(chat(messages=messages))
    assert found.problems == ()
    assert json.loads(found.columns["messages"].encode()) == messages


@given(json_values, st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), json_values))
def test_whatever_a_line_holds_it_is_a_row_or_says_why_not(value: Any, change: dict[str, Any]) -> None:
    for changed in (value, chat() | change, chat(**change), completion(prompt=value, model=value)):
        found = read(changed)
        assert bool(found.problems) != bool(found.columns)
        assert all(printable(sentence) == sentence for sentence in found.problems)
