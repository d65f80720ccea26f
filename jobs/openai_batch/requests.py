"""Reads one line of a batch file: the columns of a request's row, or the reasons why the line is no request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ...system.untrusted import parse_object, shown, shown_name
from .parameters import ENDPOINTS, INT64, Endpoint, json_text, read_parameters, text

#: Most bytes of a line: parsed JSON of many small values takes twenty times its size.
MAX_LINE_BYTES = 16 << 20
# Most characters of a model's name; names of adapters are names of folders.
_MAX_MODEL_CHARACTERS = 512
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of a batch file."""

    #: Id of the row; None when the line has none that a row can have.
    custom_id: str | None
    #: Role of the prompt among `columns`; "" without a prompt.
    prompt_role: str = ""
    #: Column -> value of the row, without its id; empty when there are `problems`.
    columns: Mapping[str, Any] = field(default_factory=dict)
    #: Reasons why the line is no request, one sentence each.
    problems: tuple[str, ...] = ()


def read_request(line: bytes | None, base_models: Collection[str]) -> BatchRequest:
    """The request of a line (None: a line that is too long). `base_models`: models that ask for no adapter."""
    try:
        request = _parsed(line)
    except ValueError as error:
        return BatchRequest(None, problems=(str(error),))
    custom_id = request.get("custom_id") if _is_text(request.get("custom_id")) else None
    url, body = request.get("url"), request.get("body")
    endpoint = ENDPOINTS.get(url) if isinstance(url, str) else None
    problems = list(_problems(request))
    role, columns = "", dict[str, Any]()
    if endpoint is not None and isinstance(body, dict):
        role, columns, found = _row(body, endpoint, base_models)
        problems += found
    return BatchRequest(custom_id, role, {} if problems else columns, tuple(problems))


def _problems(request: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a request outside of its body, as sentences."""
    custom_id, method, url, body = (request.get(key) for key in _KEYS)
    if not _is_text(custom_id):
        yield f"custom_id={_value(custom_id)}: expected text."
    if method != "POST":
        yield f"method={_value(method)}: expected POST."
    if not isinstance(url, str) or url not in ENDPOINTS:
        yield f"url={_value(url)}: expected {' or '.join(ENDPOINTS)}."
    if not isinstance(body, dict):
        yield f"body={_value(body)}: expected an object."
    unknown = next((key for key, value in request.items() if key not in _KEYS and value is not None), None)
    if unknown is not None:
        yield f"{shown_name(unknown)}: not a key of a request; expected {', '.join(_KEYS)}."


def _parsed(line: bytes | None) -> dict[str, Any]:
    """The object of a line. Raises `ValueError` with a sentence."""
    if line is None:
        raise ValueError(f"The line has more than {MAX_LINE_BYTES >> 20} MiB. Shorten the request.")
    try:
        return parse_object(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"The line is not UTF-8 text at byte {error.start}.") from None
    except ValueError as error:
        raise ValueError(f"The line is no JSON object: {error}.") from None


def _row(
    body: dict[str, Any], endpoint: Endpoint, base_models: Collection[str]
) -> tuple[str, dict[str, Any], list[str]]:
    """The role of the prompt, the columns of the row, and every problem."""
    columns, problems = read_parameters(body, endpoint)
    model, prompt, role = body.get("model"), body.get(endpoint.prompt), ""
    if _is_text(model) and len(model) <= _MAX_MODEL_CHARACTERS:
        columns |= {"adapter": None if model in base_models else model, "openai_model": model}
    else:
        problems.append(f"model={_value(model)}: expected the name of an adapter or of the base model.")
    try:
        role, value = _PROMPTS[endpoint.prompt](prompt)
        columns[role] = value
    except ValueError as error:
        problems.append(f"{endpoint.prompt}={_value(prompt)}: {error}.")
    return role, columns, problems


def _messages(value: Any) -> tuple[str, str]:
    """The role of messages, and their whole JSON: the job checks them, and chat templates read them."""
    if not isinstance(value, list):
        raise ValueError("expected a list of messages")
    try:
        return "messages", json_text(value)
    except ValueError as error:
        raise ValueError(f"no JSON that can be written ({error})") from None


def _prompt(value: Any) -> tuple[str, str | list[int]]:
    """The role and value of a completion's one prompt: a text, or token ids. A list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if _is_text(value):
        return "prompt", value
    if isinstance(value, list) and value and all(type(item) is int and item in INT64 for item in value):
        return "prompt_token_ids", value
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str | list) for item in value):
        raise ValueError("expected one prompt. Write a request for each")
    raise ValueError("expected text or a list of token ids")


_PROMPTS: Mapping[str, Callable[[Any], tuple[str, Any]]] = {"messages": _messages, "prompt": _prompt}


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether the value is a text, not empty, that a column can hold."""
    try:
        return bool(text(value))
    except ValueError:
        return False


def _value(value: Any) -> str:
    return "null" if value is None else shown(value)
