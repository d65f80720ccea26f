"""Job files are YAML 1.2: words that older YAML makes booleans, dates or other numbers are texts or refused."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.opening.job_file import read_job_file
from lorabatch.jobs.spec import JobSpec

BASICS = {"model": "m", "input": "i", "output": "o"}


def read(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return read_job_file(path, {})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *((word, word) for word in ("yes", "no", "On", "OFF", "y", "N", "12:30", "1:20:30", "2026-01-31", "1_000")),
        *((word, word) for word in ("2026-01-31T10:00:00Z", "0b11", "0x", "nil", "None", "=", "a", "1.2.3")),
        ("true", True), ("FALSE", False), ("~", None), ("Null", None), ("0o17", 15), ("0x1F", 31), ("-7", -7),
        ("1e3", 1000.0), ("1.5", 1.5), (".5", 0.5), ("5.", 5.0), ("-.inf", float("-inf")), ("0", 0), ("0.10", 0.1),
        ("'010'", "010"), ('"yes"', "yes"), ("!!str 5", "5"), ("[yes, 12:30]", ["yes", "12:30"]),
    ],
)  # fmt: skip
def test_plain_words_are_those_of_yaml_1_2(written: str, value: Any, tmp_path: Path) -> None:
    found = read(tmp_path, f"storage_options: {{inner: {written}}}\n")
    assert found == {"storage_options": {"inner": value}}
    assert type(found["storage_options"]["inner"]) is type(value)


@pytest.mark.parametrize("word", ["010", "-017", "08", "007"])
def test_numbers_with_a_leading_zero_are_refused_by_name(word: str, tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match=f"line 2: {word} begins with 0.*Write it in quotes for text, without"):
        read(tmp_path, f"json_schema:\n  enum: [{word}]\n")
    assert read(tmp_path, f"json_schema:\n  enum: ['{word}']\n") == {"json_schema": {"enum": [word]}}
    assert read(tmp_path, f"seed: {word.replace('0', '')}\n") == {"seed": int(word.replace("0", ""))}


@pytest.mark.parametrize("tag", ["timestamp 2026-01-31", "binary aGk=", "set {a}", "omap [a: 1]", "python/none x"])
def test_values_that_json_does_not_have_are_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match="not valid YAML"):
        read(tmp_path, f"json_schema:\n  const: !!{tag}\n")


def test_options_that_take_text_have_it_as_it_is_written(tmp_path: Path) -> None:
    text = (
        "model: 1.10\ninput: [2026-01-31, 0x10]\noutput: 007\nchoice: [yes, no, unclear, 1.10, true, null, 010]\n"
        "stop: 1e3\nname: 2026\nadapters: {2024: 1.0, yes: no}\ncolumns: {prompt: 12}\nmax_errors: 5\nmigration: no\n"
    )
    job = JobSpec(**read(tmp_path, text))
    assert (job.model, job.inputs, job.output) == ("1.10", ("2026-01-31", "0x10"), "007")
    assert job.choice == ("yes", "no", "unclear", "1.10", "true", "null", "010")
    assert (job.stop, job.name, job.max_errors) == (("1e3",), "2026", "5")
    assert job.adapters == {"2024": "1.0", "yes": "no"}
    assert (job.columns, job.migration) == ({"prompt": "12"}, False)


@pytest.mark.parametrize("words", ["yes, no", "on, off", "2026-01-31, 2026-02-01", "12:30, 14:45", "y, n"])
def test_enumerations_in_schemas_and_tools_are_texts(words: str, tmp_path: Path) -> None:
    job = JobSpec(
        **read(
            tmp_path,
            f"model: m\ninput: i\noutput: o\njson_schema: {{properties: {{no: {{enum: [{words}]}}}}}}\ntools:\n"
            f"- {{type: function, function: {{name: f, parameters: {{properties: {{on: {{enum: [{words}]}}}}}}}}}}\n"
            "chat_template_kwargs: {thinking: off}\n",
        )
    )
    texts = words.split(", ")
    assert json.loads(job.json_schema) == {"properties": {"no": {"enum": texts}}}
    assert json.loads(job.tools or "")[0]["function"]["parameters"] == {"properties": {"on": {"enum": texts}}}
    assert json.loads(job.chat_template_kwargs or "") == {"thinking": "off"}


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=9), min_size=1)
)
def test_any_text_in_quotes_is_that_text(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert read(folder, json.dumps({"choice": texts, "storage_options": {text: text for text in texts}})) == {
        "choice": texts, "storage_options": {text: text for text in texts}
    }  # fmt: skip


def test_characters_of_two_escapes_are_one_and_halves_are_refused(tmp_path: Path) -> None:
    text = 'model: m\ninput: i\noutput: o\nchoice: ["\\ud83d\\ude00", "\\ud83d"]\n'
    assert JobSpec(**read(tmp_path, text.replace(', "\\ud83d"', ""))).choice == ("😀",)
    with pytest.raises(JobRequestError, match="not valid YAML"):
        read(tmp_path, text)


class Answer(BaseModel):
    """An answer of two keys."""

    label: Literal["spam", "ham"]
    score: int


@pydantic_dataclass
class Point:
    """A dataclass of pydantic."""

    x: float


class Callback(BaseModel):
    """A class that no JSON Schema says."""

    call: Callable[[int], int]


class Undefined(BaseModel):
    """A class whose types are not there."""

    part: Missing  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (Answer, Answer.model_json_schema()),
        (Answer(label="spam", score=1), Answer.model_json_schema()),
        (Point, TypeAdapter(Point).json_schema()),
        (TypeAdapter(list[Answer]), TypeAdapter(list[Answer]).json_schema()),
    ],
)
def test_a_class_of_pydantic_is_its_schema(value: Any, schema: Any) -> None:
    assert json.loads(JobSpec(**BASICS, json_schema=value).json_schema) == schema


@pytest.mark.parametrize("value", [Callback, Undefined, BaseModel])
def test_a_class_without_a_schema_is_refused_with_the_reason(value: Any) -> None:
    with pytest.raises(JobRequestError, match=r"json_schema=.*pydantic finds no schema: .*a class of pydantic 2"):
        JobSpec(**BASICS, json_schema=value)


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 31), object(), {1, 2}, b"a", math.nan])
def test_a_schema_of_values_that_json_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(JobRequestError, match=r"json_schema=.*not JSON .*a class of pydantic"):
        JobSpec(**BASICS, json_schema={"enum": [value]})
