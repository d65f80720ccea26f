"""Forty conversations as rows have them: each with messages, and with tools and template variables where it has any.

Every text has a word `needle…` of its own, by which a suite finds what did not reach a prompt. Reasoning has none:
templates drop that of earlier turns.
"""

from __future__ import annotations

import itertools
from typing import Any

_numbers = itertools.count()


def _text(before: str = "", after: str = "") -> str:
    return f"{before}needle{next(_numbers)}w{after}"


def _says(role: str, content: Any = None, **beside: Any) -> dict[str, Any]:
    return {"role": role, "content": _text() if content is None else content, **beside}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(name: str, arguments: Any, **beside: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **beside}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _turns(number: int) -> list[dict[str, Any]]:
    return [_says(("user", "assistant")[turn % 2]) for turn in range(2 * number - 1)]


def _named(name: str, *messages: dict[str, Any], tools: Any = None, **variables: Any) -> tuple[str, dict[str, Any]]:
    return name, {"messages": list(messages), "tools": tools, "chat_template_kwargs": variables}


WEATHER = _tool("get_weather", "The weather of a city.", city={"type": "string", "description": "Its name."})
TIME = _tool("time", "The time in a zone.", zone={"type": "string", "enum": ["UTC", "CET"]})
NESTED = _tool(
    "book",
    'A "quoted" <b>flight</b>.',
    legs={"type": "array", "items": {"type": "object", "properties": {"to": {"type": ["string", "null"]}}}},
)
BARE = {"type": "function", "function": {"name": "now", "description": "Now.", "parameters": {}}}
_ASKED_IN_CALL = _says("assistant", "", tool_calls=[_call("get_weather", {"city": "Rome"}, id="call00001")])
_ANSWERS = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather"}

CONVERSATIONS: dict[str, dict[str, Any]] = dict(
    [
        _named("a question", _says("user")),
        _named("a system message", _says("system"), _says("user")),
        _named("an empty system message", _says("system", ""), _says("user")),
        _named("a developer message", _says("developer"), _says("user")),
        _named("system and developer", _says("system"), _says("developer"), _says("user")),
        _named("a system message in the middle", _says("user"), _says("assistant"), _says("system"), _says("user")),
        _named("three turns", *_turns(3)),
        _named("system and three turns", _says("system"), *_turns(3)),
        _named("thirty turns", *_turns(30)),
        _named("two questions at once", _says("user"), _says("user")),
        _named("an answer first", _says("assistant"), _says("user")),
        _named("a final answer", _says("user"), _says("assistant")),
        _named("only a system message", _says("system")),
        _named("an empty question", _says("user", "")),
        _named("a question of blanks", _says("user", " \n\t ")),
        _named("blanks at the ends", _says("system", _text("  ", "\n")), _says("user", _text("\n\n ", "  \t"))),
        _named("one part", _says("user", _parts(_text()))),
        _named("three parts", _says("user", _parts(_text(), _text(" "), _text("", "\n")))),
        _named("parts in all roles", *[_says(r, _parts(_text())) for r in ("system", "user", "assistant", "user")]),
        _named(
            "parts and texts", _says("system"), _says("user", _parts(_text(), "")), _says("assistant"), _says("user")
        ),
        _named("an empty part", _says("user", _parts("", _text()))),
        _named("a tool", _says("user"), tools=[WEATHER]),
        _named("tools and a system message", _says("system"), _says("user"), tools=[WEATHER, TIME, NESTED]),
        _named("a tool's name in a text", _says("user", _text("What time is it now? ")), tools=[TIME, BARE]),
        _named("a call", _says("user"), _ASKED_IN_CALL, _says(**_ANSWERS), tools=[WEATHER]),
        _named(
            "a call in JSON",
            _says("user"),
            _says("assistant", "", tool_calls=[_call("get_weather", '{"city": "Röm", "n": null}', id="call00001")]),
            _says(**_ANSWERS),
            _says("assistant"),
            _says("user"),
            tools=[WEATHER],
        ),
        _named(
            "two calls at once",
            _says("user"),
            _says("assistant", "", tool_calls=[_call("get_weather", {"city": c}, id=f"call0000{c}") for c in "12"]),
            _says("tool", tool_call_id="call00001", name="get_weather"),
            _says("tool", tool_call_id="call00002", name="get_weather"),
            tools=[WEATHER],
        ),
        _named(
            "a call beside text",
            _says("user"),
            _says("assistant", tool_calls=[_call("book", {"legs": [{"to": "A"}, {"to": None}]}, id="call00001")]),
            _says(**_ANSWERS),
            tools=[NESTED],
        ),
        _named("a call with null content", _says("user"), _ASKED_IN_CALL | {"content": None}, _says(**_ANSWERS)),
        _named("a result in parts", _says("user"), _ASKED_IN_CALL, _says(**_ANSWERS, content=_parts(_text(), _text()))),
        _named("a call without an answer", _says("user"), _ASKED_IN_CALL, tools=[WEATHER]),
        _named(
            "reasoning beside an answer",
            _says("user"),
            _says("assistant", reasoning_content="let me think"),
            _says("user"),
        ),
        _named(
            "reasoning before a call",
            _says("user"),
            _ASKED_IN_CALL | {"thinking": "let me look"},
            _says(**_ANSWERS),
            tools=[WEATHER],
        ),
        _named(
            "reasoning in an answer", _says("user"), _says("assistant", _text("<think>\nhm\n</think>\n")), _says("user")
        ),
        _named("nulls", _says("user", name=None, tool_calls=None), _says("assistant", refusal=None), _says("user")),
        _named("names", _says("user", name="Ann"), _says("assistant", name="Bob"), _says("user", name="Ann")),
        _named("an unknown role", _says("narrator"), _says("user")),
        _named(
            "signs of all kinds",
            _says(
                "user", _text("é 中文 🦙👩‍👩‍👧 שלום \u202e عربي e\u0301 \u00a0\u2028 {{ x }} {% if %} \\n '\"<&>\r\n")
            ),
            _says("assistant", _text("```py\nprint(f'{x}')\n```\n")),
            _says("user"),
        ),
        _named("texts of special tokens", _says("user", _text("<|im_end|> <s> [INST] <|eot_id|> ")), thinking=True),
        _named(
            "a long one", _says("system"), _says("user", " ".join(_text() for _ in range(3000))), enable_thinking=False
        ),
    ]
)
assert len(CONVERSATIONS) == 40
