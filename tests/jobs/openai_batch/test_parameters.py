"""Each parameter of a body becomes its column, asks for nothing, or is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import openai.types.shared_params
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import chat
from openai.types import completion_create_params as of_completions

import lorabatch
from lorabatch.engine.request import SAMPLING_OPTIONS
from lorabatch.jobs.input.columns import find_roles
from lorabatch.jobs.openai_batch.parameters import (
    CHAT,
    COLUMN_KINDS,
    COMPLETIONS,
    IGNORED,
    PLAIN,
    REFUSED,
    RENAMED,
    Endpoint,
    json_text,
    read_parameters,
    text,
)
from lorabatch.system.untrusted import printable

CHAT_DEFAULTS = {"temperature": 1.0}


def columns(endpoint: Endpoint = CHAT, **body: Any) -> dict[str, Any]:
    found, problems = read_parameters(body, endpoint)
    assert problems == []
    return {name: value for name, value in found.items() if endpoint.defaults.get(name) != value}


def problems(endpoint: Endpoint = CHAT, **body: Any) -> list[str]:
    return read_parameters(body, endpoint)[1]


def test_every_sampling_option_is_a_column_of_a_type_that_a_job_reads() -> None:
    of_jobs = {"continuation_token_ids", "teacher_top_k"}  # no settings of rows
    assert SAMPLING_OPTIONS.keys() - of_jobs <= COLUMN_KINDS.keys()
    schema = pa.schema([("prompt", pa.string()), *((name, arrow) for name, (arrow, _, _) in COLUMN_KINDS.items())])
    assert find_roles(schema, {}, row_settings=["all"])[1] == []


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (CHAT, {"max_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"temperature": 0, "top_p": 1}, {"temperature": 0.0, "top_p": 1.0}),
        (CHAT, {"temperature": None, "top_p": None}, {}),
        (CHAT, {"stop": "end"}, {"stop": ["end"]}),
        (CHAT, {"stop": ["end", "é"]}, {"stop": ["end", "é"]}),
        (CHAT, {"seed": -1, "top_k": -1}, {"seed": -1, "top_k": 0}),
        (CHAT, {"logprobs": True}, {"logprobs": True}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"logprobs": 0}, {"logprobs": True}),
        (COMPLETIONS, {"logprobs": 3}, {"top_logprobs": 3}),
        (CHAT, {"n": 3, "presence_penalty": 0.5, "min_p": 0.1}, {"n": 3, "presence_penalty": 0.5, "min_p": 0.1}),
        (CHAT, {"logit_bias": {"5": -100}}, {"logit_bias": '{"5": -100}'}),
        (CHAT, {"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
        (CHAT, {"response_format": {"type": "text"}}, {"response_format": '{"type": "text"}'}),
        (CHAT, {"chat_template_kwargs": {"a": True}}, {"chat_template_kwargs": '{"a": true}'}),
        (CHAT, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (COMPLETIONS, {"max_tokens": 5}, {"max_tokens": 5}),
        (CHAT, {"min_tokens": 2, "ignore_eos": True, "top_k": 4}, {"min_tokens": 2, "ignore_eos": True, "top_k": 4}),
    ],
)
def test_parameters_become_the_columns_that_play_their_role(
    endpoint: Endpoint, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert columns(endpoint, **body) == expected


def test_where_a_body_says_nothing_the_defaults_of_openai_hold() -> None:
    assert read_parameters({}, CHAT) == ({"temperature": 1.0}, [])
    assert read_parameters({"temperature": None}, COMPLETIONS) == ({"temperature": 1.0, "max_tokens": 16}, [])


def test_parameters_that_ask_for_nothing_leave_no_trace() -> None:
    plain = {
        "n": 1, "stream": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [],
        "response_format": {"type": "text"}, "parallel_tool_calls": True,
    }  # fmt: skip
    ignored = {"user": "me", "metadata": {"a": [1]}, "store": True, "service_tier": "flex", "model": 1, "messages": 2}
    unset = {"tool_choice": None, "something_new": None}
    found = columns(**plain, **ignored, **unset)
    assert found.keys() <= plain.keys() & COLUMN_KINDS.keys()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"audio": {"voice": "x"}}, "audio={'voice': 'x'}: not supported. Leave it out."),
        ({"stream": True}, "stream=True: not supported. Leave it out."),
        ({"best_of": True}, "best_of=True: not supported. Leave it out."),
        ({"prompt": "x"}, "prompt='x': not supported. Leave it out."),
        ({"id": "x"}, "id='x': not supported. Leave it out."),
        ({"continuation": ["x"]}, "continuation=['x']: not supported. Leave it out."),
        ({"prompt_token_ids": [1]}, "prompt_token_ids=[1]: not supported. Leave it out."),
        ({"\x1b[2J": 1}, "\\x1b[2J=1: not supported. Leave it out."),
        ({"max_tokens": 5.5}, "max_tokens=5.5: expected an integer."),
        ({"max_tokens": True}, "max_tokens=True: expected an integer."),
        ({"max_tokens": 2**63}, f"max_tokens={2**63}: expected an integer."),
        ({"temperature": "hot"}, "temperature='hot': expected a number."),
        ({"temperature": True}, "temperature=True: expected a number."),
        ({"stop": [None]}, "stop=[None]: expected text or a list of texts."),
        ({"stop": "\ud800"}, "stop='\\ud800': expected text or a list of texts."),
        ({"ignore_eos": 1}, "ignore_eos=1: expected true or false."),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens=6: max_tokens is 5 already. Leave one out.",
        ),
    ],
)
def test_everything_else_is_refused_by_name(body: dict[str, Any], problem: str) -> None:
    assert problems(**body) == [problem]


def keys_of(module: Any, name: str) -> set[str]:
    """Keys of one of openai's types, with those of its bases."""
    return set(get_type_hints(getattr(module, name)))


@pytest.mark.reference("openai")
@pytest.mark.parametrize(("endpoint", "module"), [(CHAT, chat.completion_create_params), (COMPLETIONS, of_completions)])
def test_every_parameter_of_openai_is_classified(
    endpoint: Endpoint, module: Any, unclassified: Callable[[Iterable[str]], None]
) -> None:
    found = keys_of(module, "CompletionCreateParamsNonStreaming") | keys_of(module, "CompletionCreateParamsStreaming")
    assert len(found) > 15
    known = {"model", endpoint.prompt, *COLUMN_KINDS, *RENAMED, *IGNORED, *PLAIN, *REFUSED}
    unclassified(found - known)


#: Keys of openai's messages: what templates read, and what is an error row where a template leaves it out.
OF_MESSAGES = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
#: Keys of parts that are text, of calls and of tools. `prompt_cache_breakpoint` is of the service's caches.
OF_PARTS = {"type", "text", "prompt_cache_breakpoint"}
OF_CALLS, OF_TOOLS = {"id", "type", "function"}, {"type", "function"}
OF_FUNCTIONS = {"name", "description", "parameters", "strict"}


@pytest.mark.reference("openai")
def test_every_key_of_openai_s_messages_and_tools_is_classified(
    unclassified: Callable[[Iterable[str]], None],
) -> None:
    roles = [name for name in dir(chat) if re.fullmatch(r"ChatCompletion[A-Z][a-z]+MessageParam", name)]
    assert len(roles) > 5
    found = set().union(*(keys_of(chat, name) for name in roles)) - OF_MESSAGES
    found |= keys_of(chat, "ChatCompletionContentPartTextParam") - OF_PARTS
    found |= keys_of(chat, "ChatCompletionMessageFunctionToolCallParam") - OF_CALLS
    found |= keys_of(chat, "ChatCompletionFunctionToolParam") - OF_TOOLS
    found |= keys_of(openai.types.shared_params, "FunctionDefinition") - OF_FUNCTIONS
    unclassified(found)


def test_a_parameter_has_one_meaning() -> None:
    groups = [COLUMN_KINDS.keys(), RENAMED.keys(), IGNORED.keys(), PLAIN.keys(), REFUSED.keys()]
    assert len(set().union(*groups)) == sum(map(len, groups))


def parameter_table() -> str:
    """The table of docs/guides/openai-batch.md."""
    lines = ["| parameter | |", "|---|---|"]
    for why, pairs in groupby(IGNORED.items(), key=lambda pair: pair[1]):
        lines.append(f"| {' '.join(f'`{name}`' for name, _ in pairs)} | left out: about {why} |")
    plain = " ".join(f"`{name}: {json.dumps(value)}`" for name, (value,) in PLAIN.items())
    lines.append(f"| {plain} | left out: what every answer has; other values are refused |")
    for next_step, pairs in groupby(REFUSED.items(), key=lambda pair: pair[1]):
        lines.append(f"| {' '.join(f'`{name}`' for name, _ in pairs)} | refused: {next_step} |")
    return "\n".join([*lines, "| any other | refused |"])


def test_the_documented_table_of_parameters_is_the_one_that_is_used() -> None:
    page = Path(lorabatch.__file__).parent / "docs" / "guides" / "openai-batch.md"
    assert parameter_table() in page.read_text("utf-8"), parameter_table()


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_what_a_refusal_advises_is_taken(name: str) -> None:
    [said] = problems(**{name: "low"})
    assert said == f"{name}='low': not supported. Give it to the chat template by chat_template_kwargs."
    assert columns(chat_template_kwargs={name: "low"}) == {"chat_template_kwargs": f'{{"{name}": "low"}}'}


def test_many_problems_are_counted_not_listed() -> None:
    found = problems(**{f"x{i}": i for i in range(100)})
    assert found[:2] == ["x0=0: not supported. Leave it out.", "x1=1: not supported. Leave it out."]
    assert found[5:] == ["95 more parameters are wrong."]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_json_in_a_column_is_the_value_and_text_that_files_can_hold(value: Any) -> None:
    assert json.loads(text(json_text(value))) == value


@pytest.mark.parametrize("value", ["é \ud800", {"\udfff": 1}])
def test_halves_of_surrogate_pairs_are_written_out(value: Any) -> None:
    assert json.loads(text(json_text(value))) == value


@given(st.dictionaries(st.sampled_from([*COLUMN_KINDS, "n", "user", "tools", "audio"]), json_values, max_size=5))
def test_whatever_a_body_asks_a_column_holds_it_or_a_sentence_says_why_not(body: dict[str, Any]) -> None:
    found, sentences = read_parameters(body, CHAT)
    for name, value in found.items():
        pa.array([value], COLUMN_KINDS[name][0])
    assert found.keys() <= COLUMN_KINDS.keys()
    assert all(sentence.endswith(".") and printable(sentence) == sentence for sentence in sentences)


STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("as_text", [False, True])
def test_strict_tools_are_refused_by_name_and_other_tools_are_not(as_text: bool) -> None:
    def tools(*functions: dict[str, Any]) -> Any:
        given = [{"type": "function", "function": function} for function in functions]
        return json.dumps(given) if as_text else given

    plain = {**STRICT, "strict": False}
    [said] = problems(tools=tools(plain, STRICT))
    assert said.startswith("tools[1].function.strict=True: arguments are not held to their schema. Leave strict out")
    for functions in ((plain,), ({"name": "f"},), ({**plain, "strict": None},)):
        assert problems(tools=tools(*functions)) == []
    # what the refusal advises
    form = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": STRICT["parameters"]}}
    assert problems(response_format=form) == []


@pytest.mark.parametrize(
    ("tools", "said"),
    [([1], "tools[0]=1"), ([{"type": "custom"}], "tools[0].type='custom'"), ("{", "tools"), ({"a": 1}, "tools=")],
)
def test_tools_that_a_job_would_refuse_are_refused_at_once(tools: Any, said: str) -> None:
    assert said in problems(tools=tools)[0]
