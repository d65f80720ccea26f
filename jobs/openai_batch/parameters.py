"""Turns the parameters of a request's body into columns: each becomes the column of its role, nothing, or a problem.

The columns are the ones that a job reads (`COLUMN_ROLES`), so a new option of sampling becomes a column here too.
Everything else is in the tables of this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ...engine.request import SAMPLING_OPTIONS
from ...engine.text.chat.conversation import read_tools
from ...system.untrusted import shown, shown_name
from ..options.values import COLUMN_ROLES, PROMPT_ROLES

_PROBLEMS_SHOWN = 5
#: Range of Arrow's 64-bit integers.
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of the API."""

    #: Path of the endpoint.
    url: str
    #: Parameter with the prompt.
    prompt: str
    #: Column -> OpenAI's default, where a job has another one.
    defaults: Mapping[str, Any]
    #: Parameter -> pairs of a value and its value in the column (None: the job's value), where the two differ.
    meanings: Mapping[str, tuple[tuple[Any, Any], ...]] = field(default_factory=dict)


CHAT = Endpoint(
    "/v1/chat/completions",
    "messages",
    {"temperature": 1.0},
    {"top_k": ((-1, 0),), "logprobs": ((False, None),)},
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    "prompt",
    {"temperature": 1.0, "max_tokens": 16},
    {"top_k": ((-1, 0),), "logprobs": ((0, True),)},
)
ENDPOINTS: Mapping[str, Endpoint] = {endpoint.url: endpoint for endpoint in (CHAT, COMPLETIONS)}

#: Parameter -> column of its role, where their names differ.
RENAMED = {"max_completion_tokens": "max_tokens"}
#: Parameter that changes no answer -> what it is about.
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("user", "safety_identifier"), "whom a request is from"),
    **dict.fromkeys(("metadata", "store", "request_id"), "the service's records"),
    **dict.fromkeys(("service_tier", "priority", "prediction"), "when answers come"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"), "the service's caches"
    ),
    "stream_options": "streams, which are refused",
}
#: Parameter without a column -> its values that change nothing.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
_TO_TEMPLATES = "Give it to the chat template by chat_template_kwargs."
#: Parameter that is refused with any value -> what to do instead. Other unknown parameters are refused, too.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("reasoning_effort", "verbosity"), _TO_TEMPLATES),
    **dict.fromkeys(("audio", "moderation", "web_search_options"), "Leave it out."),
}


def text(value: Any) -> str:
    """The value, if it is a text that files can hold. Raises `ValueError` for others, also half surrogate pairs."""
    if not isinstance(value, str):
        raise ValueError("no text")
    value.encode()
    return value


def json_text(value: Any) -> str:
    """A value as JSON, readable where files can hold its signs. Raises `ValueError` for infinite numbers and for
    values that nest too deeply.
    """
    try:
        return text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def integer(value: Any) -> int:
    """The value, if it is an integer that columns can hold. Raises `ValueError` for others."""
    if type(value) is not int or value not in INT64:
        raise ValueError("no integer of 64 bits")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("no number")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [text(value)]
    if not isinstance(value, list):
        raise ValueError("no list")
    return [text(item) for item in value]


def _integers(value: Any) -> list[int]:
    return [integer(item) for item in (value if isinstance(value, list) else [value])]


def _text_or_json(value: Any) -> str:
    return json_text(value) if isinstance(value, dict | list) else text(value)


# Type of an option -> the Arrow type of its column, its values of JSON in words, and the function that makes one
# a value of the column. It raises ValueError for others.
_KINDS: Mapping[Any, tuple[pa.DataType, str, Callable[[Any], Any]]] = {
    int: (pa.int64(), "an integer", integer),
    float: (pa.float64(), "a number", _number),
    bool: (pa.bool_(), "true or false", _boolean),
    tuple[str, ...]: (pa.list_(pa.string()), "text or a list of texts", _texts),
    tuple[int, ...]: (pa.list_(pa.int64()), "an integer or a list of integers", _integers),
}
# Kind of text options, and of options with a form of their own, which columns hold as JSON.
_JSON = (pa.string(), "text or an object", _text_or_json)
_SWITCHES = dict.fromkeys(("add_generation_prompt", "continue_final_message"), bool)
# Roles that no parameter of a request plays.
_NO_PARAMETERS = ("id", "adapter", *PROMPT_ROLES, "continuation", "continuation_token_ids")
#: Column -> its Arrow type, its values of JSON in words, and the function that reads them, for all columns that
#: parameters become.
COLUMN_KINDS: Mapping[str, tuple[pa.DataType, str, Callable[[Any], Any]]] = {
    role: _KINDS.get(SAMPLING_OPTIONS[role].kind if role in SAMPLING_OPTIONS else _SWITCHES.get(role), _JSON)
    for role in COLUMN_ROLES
    if role not in _NO_PARAMETERS
}


def read_parameters(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], list[str]]:
    """The columns of a request's body, without its model and prompt, and every problem as a sentence."""
    columns: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in _asked(body, endpoint):
        column = RENAMED.get(name, name)
        if column not in COLUMN_KINDS:
            next_step = REFUSED.get(name, "Leave it out.")
            problems.append(f"{shown_name(name)}={shown(value)}: not supported. {next_step}")
            continue
        _, expected, read = COLUMN_KINDS[column]
        try:
            found = read(value)
        except ValueError:
            problems.append(f"{name}={shown(value)}: expected {expected}.")
            continue
        if column == "tools" and (problem := _problem_with_tools(value)) is not None:
            problems.append(problem)
            continue
        if columns.setdefault(column, found) != found:
            problems.append(f"{name}={shown(value)}: {column} is {shown(columns[column])} already. Leave one out.")
    if len(problems) > _PROBLEMS_SHOWN:
        problems[_PROBLEMS_SHOWN:] = [f"{len(problems) - _PROBLEMS_SHOWN} more parameters are wrong."]
    return {**endpoint.defaults, **columns}, problems


def _asked(body: Mapping[str, Any], endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
    """The parameters that change something, with the values that columns have for them."""
    for name, value in body.items():
        if name in IGNORED or name in ("model", endpoint.prompt):
            continue
        if endpoint is COMPLETIONS and name == "logprobs" and type(value) is int and value > 0:
            name = "top_logprobs"  # this many alternatives, beside the log-probabilities of the tokens
        for theirs, ours in endpoint.meanings.get(name, ()):
            if _is_same(value, theirs):
                value = ours
                break
        is_plain = any(_is_same(value, plain) for plain in PLAIN.get(name, ()))
        if value is not None and not is_plain:
            yield name, value


def _problem_with_tools(value: Any) -> str | None:
    """Why a job would refuse a row's tools, as a sentence."""
    try:
        read_tools(value)
    except ValueError as error:
        return str(error)
    return None


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; Python alone would take true for 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
