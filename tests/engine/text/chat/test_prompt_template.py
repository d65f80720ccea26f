"""Templates of columns: strict about names and nulls, and confined like all templates."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.errors import ModelFilesError, TokenizerError
from lorabatch.engine.text.chat import sandbox
from lorabatch.engine.text.chat.conversation import read_line_breaks, read_message_templates, write_line_breaks
from lorabatch.engine.text.chat.prompt_template import PromptTemplate, columns_read, names_in

ROW: dict[str, Any] = {
    "q": "Why?",
    "nothing": None,
    "score": 1.5,
    "count": 3,
    "words": ["a", None, "b"],
    "person": {"name": "Ann", "items": [1, 2], "age": None},
}


def written(source: str, row: dict[str, Any] = ROW) -> str:
    (found,) = PromptTemplate([source]).render_all([row])
    if isinstance(found, TokenizerError):
        raise found
    (text,) = found
    return text


@pytest.mark.parametrize(
    "source",
    [
        "Q: {{ q }}\nA:",
        "{% for n in person['items'] %}{{ loop.index }}: {{ n }}\n{% endfor %}",
        "{% if score > 1 %}\n  high\n{% endif %}\nend\n",
        "{{ q | upper ~ '!' }} {{ '%05d' | format(count) }} {{ [q, 'x'] | join('/') }} {{ q[:2] }}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(q) }}{% set z = 7 %}{{ z }}",
        "{{ words | select | join(',') }} {{ person.name }} {{ words | length }}",
        "{{ q }}\n\n",
    ],
)
def test_templates_without_nulls_write_what_jinja2_writes(source: str) -> None:
    plain = jinja2.Environment(keep_trailing_newline=True)
    assert written(source) == plain.from_string(source).render(ROW)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ nothing or 'none given' }}", "none given"),
        ("{{ nothing | default('none given', true) }}", "none given"),
        ("{% if nothing is none %}yes{% endif %}{% if nothing == none %}yes{% endif %}", "yesyes"),
        ("{% if nothing %}no{% else %}yes{% endif %}{{ nothing in [none] }}", "yesTrue"),
        ("{{ [nothing, words, person] | tojson }}", f"[null, {json.dumps(ROW['words'])}, {json.dumps(ROW['person'])}]"),
        ("{{ person.age or 'unknown' }}", "unknown"),
        ("{{ person.items[1] }} {{ row['q'] }} {{ row.count }}", "2 Why? 3"),
        ("{{ words | reject('none') | join }}", "ab"),
    ],
)  # fmt: skip
def test_nulls_that_a_template_handles_are_none(source: str, text: str) -> None:
    assert written(source) == text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ nothing }}", "nothing is null; say what stands for it, as in {{ nothing or '' }}"),
        ("{{ 'x' ~ nothing }}", "nothing is null"),
        ("{{ nothing | upper }}", "nothing is null"),
        ("{{ nothing | trim }}", "nothing is null"),
        ("{{ '%s' | format(nothing) }}", "nothing is null"),
        ("{{ '{}'.format(nothing) }}", "nothing is null"),
        ("{{ words | join }}", "words[1] is null"),
        ("{{ person.age }}", "person.age is null"),
        ("{{ row['nothing'] }}", "nothing is null"),
        ("{% for word in words %}{{ word }}{% endfor %}", "words[1] is null"),
        ("{{ nothing + 1 }}", "'null' and 'int'"),
        ("{% for x in nothing %}{% endfor %}", "'null' object is not iterable"),
        ("{{ none }}", "prints a null as it is"),
        ("{{ words }}", "prints a list as it is"),
        ("{{ 'x' ~ words }}", "prints a list as it is"),
        ("{{ person }}", "prints a struct as it is"),
        ("{{ [q] }}", "prints a list as it is"),
        ("{{ words | map('length') }}", "prints a generator as it is"),
        ("{{ q.upper }}", "prints a builtin_function_or_method as it is"),
        ("{{ person.nam }}", "has no attribute 'nam'"),
        ("{{ q.__class__ }}", "unsafe"),
        ("{{ raise_exception('no row of mine') }}", "no row of mine"),
    ],
)
def test_what_would_write_python_costs_its_row(source: str, said: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        written(source)
    assert said in str(caught.value)
    assert str(caught.value).startswith("the prompt template refuses this row (")


def test_one_bad_row_costs_one_row() -> None:
    rows = [{"q": "a"}, {"q": None}, {"q": "c"}]
    first, second, third = PromptTemplate(["{{ q }}", "{{ q }}!"]).render_all(rows)
    assert (first, third) == (["a", "a!"], ["c", "c!"])
    assert isinstance(second, TokenizerError)
    assert PromptTemplate(["{{ q }}"]).render_all([{"q": str(n)} for n in range(600)]) == [[str(n)] for n in range(600)]


@pytest.mark.parametrize("source", ["{{ 'x' * 10**8 }}{{ q }}", "{{ [0] * 10**12 }}{{ q }}"])
def test_templates_that_take_too_much_memory_or_length_are_errors(source: str) -> None:
    with pytest.raises(TokenizerError):
        written(source)


def test_a_template_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_S", 1)
    monkeypatch.setattr(sandbox, "_FREE_S", 1.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ q }}"
    start_s = time.monotonic()
    found = PromptTemplate([endless]).render_all([{"q": "x"}] * 50)
    assert len(found) == 50
    assert all(isinstance(one, TokenizerError) for one in found)
    assert "is not tried again" in str(found[-1])
    assert time.monotonic() - start_s < 60


def test_dates_are_those_of_the_job() -> None:
    now = datetime(2026, 1, 31, 12, 30)
    (found,) = PromptTemplate(["{{ strftime_now('%Y-%m-%d %H:%M') }} {{ q }}"], now).render_all([ROW])
    assert found == ["2026-01-31 12:30 Why?"]


def test_names_are_those_that_jinja2_looks_up() -> None:
    source = "{% for x in rows %}{{ x.y }}{% endfor %}{% set a = b %}{{ a }}{{ range(2) | join }}{{ range2 }}"
    assert columns_read(source, ["rows", "b", "range", "a", "x"]) == (["b", "range", "rows"], ["range2"])
    assert columns_read(source, ["rows", "b"]) == (["b", "rows"], ["range2"])
    odd = "{{ row['Question text'] }} {{ row.id }} {{ row['nosuch'] }}"
    assert columns_read(odd, ["Question text", "id"]) == (["Question text", "id"], ["nosuch"])
    assert columns_read(odd, ["row", "id"]) == (["row"], [])  # a column of that name


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n{% if q %}", "line 2: Unexpected end of template"),
        ("{{ q }", "line 1: unexpected '}'"),
        ("a\nb\n{{ q | nosuch }}", "line 3: No filter named 'nosuch'"),
        ("{% include 'other' %}", "line 1 reads another template"),
        ("x\n{% extends 'other' %}", "line 2 reads another template"),
        ("{{ row | tojson }}", "line 1: row stands for all columns, expected one of them"),
        ("\n{{ row[q] }}", "line 2: row stands for all columns"),
        ("{{" + "(" * 500 + "q", "not a valid jinja2 template"),
        ("x" * (sandbox.MAX_TEMPLATE_CHARACTERS + 1), "characters, expected at most"),
    ],
)
def test_texts_that_are_no_template_are_named_by_line(source: str, said: str) -> None:
    with pytest.raises(ModelFilesError) as caught:
        names_in(source)
    assert said in str(caught.value)


def test_a_template_whose_constants_are_endless_is_refused_in_time() -> None:
    start_s = time.monotonic()
    try:
        names_in("{{ 9**(9**9) }}{{ q }}")
    except ModelFilesError as error:
        assert "not a valid jinja2 template" in str(error)  # noqa: PT017
    assert time.monotonic() - start_s < 60


@given(st.text(alphabet="\\n\nabc{", max_size=12))
def test_a_template_is_read_back_from_the_text_that_is_recorded(template: str) -> None:
    assert read_line_breaks(write_line_breaks(template)) == template
    recorded = write_line_breaks(template)
    assert write_line_breaks(read_line_breaks(recorded)) == recorded


def test_a_backslash_and_n_is_a_line_break_unless_another_backslash_stands_before() -> None:
    assert read_line_breaks(r"a\nb") == "a\nb"
    assert read_line_breaks(r"a\\nb") == r"a\nb"
    assert read_line_breaks(r"a\tb\\c") == r"a\tb\\c"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[]", "expected a list of objects"),
        ('{"role": "user"}', "expected a list of objects"),
        ('[{"role": "user"}]', "messages_template[0]="),
        ([{"role": "user", "content": "x", "name": "y"}], "expected role and content"),
        ([{"role": "user", "content": 3}], "messages_template[0].content=3: expected text"),
        ([{"role": "", "content": "x"}], "messages_template[0].role=''"),
        ("[", "not JSON"),
    ],
)
def test_templates_of_messages_are_objects_with_role_and_content(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match="messages_template") as caught:
        read_message_templates(value)
    assert said in str(caught.value)
