"""OpenAI's and vLLM's forms of structured output: known ones are read, unknown keys are never passed over."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.structured_output import CONSTRAINTS, FORMS, constraint_of

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        ("response_format", {"type": "text"}, {}),
        ("response_format", {"type": "json_object"}, {"json_schema": {"type": "object"}}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
            {"json_schema": SCHEMA},
        ),
        ("structured_outputs", {"json": SCHEMA}, {"json_schema": SCHEMA}),
        ("structured_outputs", {"json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ("structured_outputs", {"json_object": True}, {"json_schema": {"type": "object"}}),
        ("structured_outputs", {"regex": "a|b"}, {"regex": "a|b"}),
        ("structured_outputs", {"choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_forms_are_read(form: str, value: dict[str, Any], expected: dict[str, Any]) -> None:
    found = constraint_of(form, json.dumps(value))
    assert {name: json.loads(text) if name == "json_schema" else text for name, text in found.items()} == expected


def test_what_is_null_in_a_struct_is_not_there() -> None:
    row = {
        "type": "json_schema",
        "json_schema": {"name": None, "schema": {"type": "array", "items": {"type": "null", "enum": None}}},
    }
    assert json.loads(constraint_of("response_format", row)["json_schema"]) == {
        "type": "array",
        "items": {"type": "null"},
    }


@pytest.mark.parametrize(
    ("form", "value", "named"),
    [
        ("response_format", "{", "not JSON"),
        ("response_format", "[]", "expected a JSON object"),
        ("response_format", "{}", "type=None"),
        ("response_format", '{"type": "structural_tag"}', "type='structural_tag'"),
        ("response_format", '{"type": "json_schema"}', "expected an object with schema"),
        ("response_format", '{"type": "text", "other": 1}', "response_format.other: not supported"),
        ("response_format", '{"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}', "json_schema.x"),
        ("structured_outputs", "{}", "expected one of"),
        ("structured_outputs", '{"json": {}, "regex": "a"}', "expected one of"),
        ("structured_outputs", '{"regex": "a", "whitespace_pattern": " "}', "whitespace_pattern: not supported"),
        ("structured_outputs", '{"regex": 1}', "regex: expected text"),
        ("structured_outputs", '{"json":' * 9999 + "1" + "}" * 9999, "not JSON"),
    ],
)
def test_what_is_not_known_is_refused_by_name(form: str, value: str, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace("[", r"\[").replace("{", r"\{")):
        constraint_of(form, value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3),
)
_KEYS = st.sampled_from(["type", "json_schema", "schema", "json", "regex", "choice", "grammar", "json_object", "x"])


@given(form=st.sampled_from(sorted(FORMS)), value=st.dictionaries(_KEYS, _VALUES, max_size=3), as_text=st.booleans())
def test_any_value_is_read_or_refused(form: str, value: dict[str, Any], as_text: bool) -> None:
    try:
        found = constraint_of(form, json.dumps(value) if as_text else value)
    except ValueError:
        return
    assert len(found) <= 1
    assert found.keys() <= set(CONSTRAINTS)
