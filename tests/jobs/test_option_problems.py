"""What people read when an option is wrong."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from lorabatch.jobs.option_problems import unknown_options, value_problems, with_next_step, with_suggestion


class Options(BaseModel):
    model: str
    workers: int = Field(default=1, ge=1)
    storage_options: dict[str, str] = {}


def problems_of(**values):
    with pytest.raises(ValidationError) as found:
        Options(**values)
    return value_problems(found.value, values)


def test_a_key_that_is_no_option_is_named_with_what_may_have_been_meant():
    (found,) = unknown_options({"worker": 2, "model": "m"}, ("model", "workers"))
    assert found == "worker: not an option; did you mean 'workers'?"
    assert unknown_options({"model": "m"}, ("model", "workers")) == []


def test_a_word_like_no_choice_gets_no_suggestion():
    assert with_suggestion("'x' is not a role", "x", ("prompt", "adapter")) == "'x' is not a role"


def test_a_value_stands_beside_what_is_expected():
    assert problems_of(model="m", workers=0) == ["workers=0: expected at least 1"]


def test_a_missing_option_says_how_to_give_it():
    assert problems_of() == ["model: required and not given. Add --model, or the key model in the job file."]


def test_storage_options_keep_their_values_to_themselves():
    (found,) = problems_of(model="m", storage_options={"key": ["secret"]})
    assert found.startswith("storage_options: ")
    assert "secret" not in found


def test_findings_end_by_saying_where_to_look():
    assert with_next_step("workers=0: too few") == "workers=0: too few. See `lorabatch run --help`."
    assert with_next_step("model: missing?") == "model: missing?"
