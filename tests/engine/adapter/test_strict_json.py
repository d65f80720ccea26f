"""JSON read without guessing."""

from __future__ import annotations

import pytest

from lorabatch.engine.adapter.strict_json import parse_object


def test_an_object_is_read() -> None:
    assert parse_object('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_object(b'{"a": "\xc3\xa9"}') == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": {"b": 1, "b": 1}}', "key 'b' is given twice"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ("3", "it holds int, expected an object"),
        ("[" * 100_000, "it nests too deeply"),
        ("", "Expecting value"),
    ],
)
def test_anything_else_is_an_error_that_says_why(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_object(text)
