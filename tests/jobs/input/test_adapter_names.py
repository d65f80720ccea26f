"""The rule that says which adapters a row may name, by the value of a column."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.adapter_names import not_allowed, rule_problems
from lorabatch.jobs.spec import JobSpec

RULES = {"tenant": {"acme": ["acme-*", "shared"], "globex": "globex-v2", "7": "seven", "": "shared"}}
OPTION = json.dumps(RULES)


@pytest.mark.parametrize(
    ("value", "adapter", "is_free"),
    [
        ("acme", "acme-v1", True),
        ("acme", "shared", True),
        ("acme", "globex-v2", False),
        ("globex", "globex-v2", True),
        ("globex", "globex-v22", False),
        ("globex", None, True),
        (7, "seven", True),
        (None, "shared", True),
        (None, "seven", False),
        ("initech", "shared", False),
    ],
)
def test_a_row_may_name_what_the_rule_names_for_its_value(value: Any, adapter: str | None, is_free: bool) -> None:
    assert (not_allowed(OPTION, value, adapter) is None) is is_free


def test_other_values_have_a_rule_of_their_own_and_sentences_name_no_other_value() -> None:
    option = json.dumps({"tenant": RULES["tenant"] | {"*": "common"}})
    assert not_allowed(option, "initech", "common") is None
    why = not_allowed(option, "initech", "acme-v1")
    assert why == (
        "adapter='acme-v1', tenant='initech': not allowed; it may name common. Correct the row, or allowed_adapters."
    )
    assert "names none for it" in str(not_allowed(OPTION, "initech", "shared"))


def test_columns_and_adapters_that_are_not_there_are_named() -> None:
    assert rule_problems(None, (), ()) == []
    names = ("acme-v1", "globex-v2", "seven", "shared")
    assert rule_problems(OPTION, ("id", "tenant"), names) == []
    column, glob = rule_problems(OPTION, ("tenants",), names[1:])
    assert "no column 'tenant'" in column
    assert "no adapter is called 'acme-*'" in glob


@pytest.mark.parametrize(
    "wrong", ["tenant", [], {}, {"tenant": {}}, {"a": {"b": "c"}, "d": {"e": "f"}}, {"a": {"b": 3}}]
)
def test_other_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(JobRequestError, match="allowed_adapters"):
        JobSpec(model="m", input="i", output="o", adapters="a", allowed_adapters=wrong)


def test_stages_and_sweeps_have_no_column_of_adapters() -> None:
    for more in ({"for_each_adapter": ("all",)}, {"stages": {"one": {"prompt": "{{ a }}"}}}):
        with pytest.raises(JobRequestError, match="allowed_adapters: is for rows"):
            JobSpec(model="m", input="i", output="o", adapters="a", allowed_adapters=RULES, **more)


@given(st.text(max_size=5), st.sampled_from(["acme-v1", "shared", "globex-v2", "seven", None]))
def test_only_listed_values_are_free_to_name_an_adapter(value: str, adapter: str | None) -> None:
    assert not_allowed(OPTION, value, adapter) is None or adapter is not None
    if value not in RULES["tenant"] and adapter is not None:
        assert not_allowed(OPTION, value, adapter) is not None
