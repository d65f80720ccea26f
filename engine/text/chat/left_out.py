"""Finds the parts of a conversation that do not reach its prompt: texts, parts, tools and calls that a chat template
leaves out, and roles that it does not know.

No piece is searched by its name or text. The conversation is rendered again with a mark in each of its pieces. A piece
whose mark is not in that prompt is then changed alone, in several ways: it is left out if no change alters the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from ....system.untrusted import shown_name
from ...errors import TokenizerError
from .conversation import RenderOptions

#: Roles that every template takes; in some, one of them is whatever is not the other.
COMMON_ROLES = ("user", "assistant")
# Keys of OpenAI's messages of the assistant.
_INSTEAD_OF_CONTENT = ("function_call", "refusal", "audio")
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, RenderOptions], str]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a conversation. `path`: keys and places that lead to it in `{"messages": …, "tools": …}`. `changes`:
    ways to put a mark into it.
    """

    path: tuple[str | int, ...]
    name: str
    changes: tuple[Callable[..., Any], ...]


def left_out(render: Render, messages: Messages, options: RenderOptions, prompt: str) -> str | None:
    """The part of the messages that does not reach `prompt`, which `render` has made of them, as a clause; None where
    all parts do.
    """

    def attempt(given: Mapping[str, Any]) -> str | None:
        """The prompt of a changed conversation; None where the template refuses it, and so has looked at the change."""
        try:
            return render(given["messages"], replace(options, tools=given["tools"]))
        except TokenizerError:
            return None

    conversation = {"messages": list(messages), "tools": options.tools}
    pieces = [*_message_pieces(messages), *_tool_pieces(options.tools or ())]
    marks = _marks(conversation, prompt, len(pieces) + 1)
    marked: Any = conversation
    for piece, mark in zip(pieces, marks, strict=False):
        marked = _changed(marked, piece.path, partial(piece.changes[0], mark=mark))
    found = (attempt(marked) or "").lower() if pieces else ""
    for piece, mark in zip(pieces, marks, strict=False):
        changes = (partial(change, mark=mark) for change in piece.changes)
        if mark not in found and all(attempt(_changed(conversation, piece.path, c)) == prompt for c in changes):
            return f"the chat template leaves out {piece.name}: give one that has it"
    return _unknown_role(attempt, conversation, prompt, marks[-1])


def _unknown_role(
    attempt: Callable[[Mapping[str, Any]], str | None], conversation: Mapping[str, Any], prompt: str, nonsense: str
) -> str | None:
    """A role that the template takes for another one: a word that nothing knows gives the same prompt."""
    messages = conversation["messages"]
    for role in dict.fromkeys(message.get("role") for message in messages):
        if role in COMMON_ROLES or role is None:
            continue
        other = [message | {"role": nonsense} if message.get("role") == role else message for message in messages]
        if attempt({**conversation, "messages": other}) == prompt and _tells_roles_apart(attempt, nonsense):
            name = shown_name(str(role))
            return (
                f"the chat template does not know the role {name!r} and takes it for another one: give one that has it"
            )
    return None


def _tells_roles_apart(attempt: Callable[[Mapping[str, Any]], str | None], nonsense: str) -> bool:
    """Whether a template has roles at all; some write texts alone."""
    common = [{"role": role, "content": role} for role in (*COMMON_ROLES, COMMON_ROLES[0])]
    none = [message | {"role": nonsense} for message in common]
    return attempt({"messages": common, "tools": None}) != attempt({"messages": none, "tools": None})


def _message_pieces(messages: Messages) -> Iterator[_Piece]:
    """Texts that are not blank, calls, and what older or other forms of OpenAI's messages have instead of them. Blanks
    at the ends of a text are dropped by many templates.
    """
    for place, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        whose = f"of messages[{place}] (role {shown_name(str(message.get('role')))!r})"
        if isinstance(content, str) and content.strip():
            yield _Piece(("messages", place, "content"), f"the text {whose}", _TEXT_CHANGES)
        for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part["text"].strip():
                path = ("messages", place, "content", number, "text")
                yield _Piece(path, f"part {number} {whose}", _TEXT_CHANGES)
        for key in _INSTEAD_OF_CONTENT:
            if message.get(key):
                yield _Piece(("messages", place, key), f"{key} {whose}", _VALUE_CHANGES)
        for number, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
            if isinstance(call, Mapping):
                yield _Piece(("messages", place, "tool_calls", number), f"tool_calls[{number}] {whose}", _CALL_CHANGES)


def _tool_pieces(tools: Sequence[Mapping[str, Any]]) -> Iterator[_Piece]:
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if isinstance(function, Mapping):
            name = shown_name(str(function.get("name")))
            yield _Piece(("tools", place), f"the tool {name!r}", _TOOL_CHANGES)


def _marks(conversation: Mapping[str, Any], prompt: str, number: int) -> list[str]:
    """Words that stand nowhere yet, none of them part of another. Small letters and digits stay what they are in JSON,
    and where templates make letters small.
    """
    taken = json.dumps(conversation, ensure_ascii=False, default=str).lower() + prompt.lower()
    stem = next(word for n in count() if (word := f"q{n}z") not in taken)
    return [f"{stem}{n}x" for n in range(number)]


def _changed(value: Any, path: Sequence[str | int], change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists and mappings with another value at the end of `path`."""
    if not path:
        return change(value)
    inner = _changed(value[path[0]], path[1:], change)
    if isinstance(value, Mapping):
        return {**value, path[0]: inner}
    return [inner if place == path[0] else item for place, item in enumerate(value)]


def _altered(value: Any, mark: str) -> Any:
    """A value with the mark in each of its texts."""
    if isinstance(value, Mapping):
        return {key: _altered(part, mark) for key, part in value.items()}
    return f"{value}{mark}"


def _called(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """A call of another function with one argument more."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _called(function, mark)}
    arguments = call.get("arguments")
    more = {**arguments, mark: mark} if isinstance(arguments, Mapping) else f"{arguments or ''}{mark}"
    return {**call, "name": f"{call.get('name') or ''}{mark}", "arguments": more}


def _described(tool: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """A tool of another name, with one word more in its description."""
    function = tool["function"]
    texts = {key: f"{function.get(key) or ''}{mark}" for key in ("name", "description")}
    return {**tool, "function": {**function, **texts}}


def _with_parameter(tool: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """A tool with one parameter more."""
    function = tool["function"]
    parameters = function.get("parameters")
    known = parameters.get("properties") if isinstance(parameters, Mapping) else None
    properties = {**(known if isinstance(known, Mapping) else {}), mark: {"type": "string", "description": mark}}
    found = {"type": "object", **(parameters if isinstance(parameters, Mapping) else {}), "properties": properties}
    return {**tool, "function": {**function, "parameters": found}}


_TEXT_CHANGES = (lambda text, mark: text + mark, lambda text, mark: mark + text, lambda _, mark: mark)
_CALL_CHANGES = (_called,)
_VALUE_CHANGES = (_altered,)
_TOOL_CHANGES = (_described, _with_parameter)
