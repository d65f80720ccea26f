"""The option `stages`: what a stage may say, and what names it may use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lorabatch.engine.errors import ModelFilesError
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.options.stages import stages_of, until_of
from lorabatch.jobs.record import IDENTITY_FIELDS
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.stages import named_stages, repeated_stages, stage_spec

FLOW: dict[str, Any] = {
    "draft": {"adapter": {"column": "tenant"}, "messages": "{{ subject }}\n{{ body }}", "n": 4, "temperature": 0.8},
    "judge": {
        "for_each": "draft",
        "adapter": "judge-v3",
        "messages": "{{ body }}\n{{ draft.completion }}",
        "choice": ["good", "bad"],
    },
    "best": {"pick": "draft", "by": "judge.probability.good"},
    "fix": {"when": "best.by < 0.7", "continues": "best", "messages": "Shorter, please."},
}
COLUMNS = ["id", "tenant", "subject", "body"]


def spec(stages: Any, **options: Any) -> JobSpec:
    return JobSpec(model="m", input="i", output="o", stages=stages, **options)


def check(stages: Any, columns: list[str]) -> None:
    """Raise `JobRequestError` with what is wrong with stages over these columns."""
    problems = named_stages(spec(stages), columns, {"judge-v3": "folder"})[1]
    if problems:
        raise JobRequestError(*problems)


def test_stages_are_read_from_a_mapping_and_from_json_alike() -> None:
    given, text = spec(FLOW), spec(json.dumps(FLOW))
    assert stages_of(given.stages) == stages_of(text.stages)
    assert [stage.name for stage in stages_of(given.stages)] == list(FLOW)
    draft, judge, best, fix = stages_of(given.stages)
    assert (draft.adapter_column, draft.num_samples, draft.is_list) == ("tenant", 4, True)
    assert (judge.adapter, judge.for_each, judge.is_list) == ("judge-v3", "draft", True)
    assert not best.asks
    assert (fix.continues, fix.has_adapter, fix.is_list) == ("best", False, False)


def test_each_stage_has_the_options_of_the_job_and_its_own() -> None:
    job = spec(FLOW, max_tokens=99, temperature=0.1)
    draft, judge, *_ = stages_of(job.stages)
    assert (stage_spec(job, draft).temperature, stage_spec(job, judge).temperature) == (0.8, 0.1)
    assert stage_spec(job, draft).max_tokens == 99
    assert stage_spec(job, judge).choice == ("good", "bad")
    assert stage_spec(job, judge).templates == (("user", "{{ body }}\n{{ draft.completion }}"),)


def test_a_conversation_goes_on_with_the_options_that_it_began_with() -> None:
    stages = {
        "ask": {"messages": "{{ body }}", "system_prompt": "Be kind."},
        "more": {"continues": "ask", "messages": "More."},
    }
    job = spec(stages, system_prompt="Be short.")
    assert [stage_spec(job, stage).system_prompt for stage in stages_of(job.stages)] == ["Be kind.", "Be kind."]


def test_the_columns_that_stages_read_are_found() -> None:
    read, problems = named_stages(spec(FLOW), COLUMNS, {"judge-v3": "folder"})
    assert (sorted(read), problems) == (["body", "subject", "tenant"], [])


def test_stages_identify_a_job() -> None:
    assert {"stages", "until", "output_columns"} <= set(IDENTITY_FIELDS)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({}, "expected a mapping of stages"),
        ([1], "expected a mapping of stages"),
        ("{", "not JSON"),
        ({"a": 1}, "expected a mapping of stages"),
        ({"a b": {"messages": "{{ x }}"}}, "expected a name"),
        ({"error": {"messages": "{{ x }}"}}, "expected a name"),
        ({"a": {}}, "expected one of messages, prompt and pick, found none"),
        ({"a": {"messages": "x", "prompt": "y"}}, "found messages, prompt"),
        ({"a": {"messages": "{{ x }}", "max_token": 3}}, "did you mean 'max_tokens'"),
        ({"a": {"messages": "{{ x }}", "max_tokens": -3}}, "max_tokens=-3"),
        ({"a": {"messages": "{{ x }}", "output": "o"}}, "a stage has no such option"),
        ({"a": {"messages": [{"role": "user"}]}}, "expected role and content"),
        ({"a": {"messages": "{{ x }}", "adapter": 3}}, "adapter=3"),
        ({"a": {"messages": "{{ x }}", "adapter": {"columns": "x"}}}, "adapter="),
        ({"a": {"messages": "{{ x }}", "when": "x"}}, "the first stage asks every row"),
        ({"a": {"pick": "b", "by": "b.x"}}, "a pick comes after"),
        ({"a": {"messages": "{{ x }}"}, "b": {"pick": "a", "by": "a.x"}}, "has one result a row"),
        ({"a": {"messages": "{{ x }}", "n": 2}, "b": {"pick": "a"}}, "expected pick and by together"),
        ({"a": {"messages": "{{ x }}", "n": 2}, "b": {"pick": "a", "by": "x", "n": 2}}, "belongs to a request"),
        (
            {"a": {"messages": "{{ x }}"}, "b": {"messages": "y", "when": "c.x"}, "c": {"messages": "z"}},
            "comes after it",
        ),
        ({"a": {"messages": "{{ x }}"}, "b": {"messages": "y", "when": "b.x == 1"}}, "reads itself"),
        ({"a": {"messages": "{{ x }}"}, "b": {"for_each": "c", "messages": "y"}}, "no stage 'c'|no stage c"),
        ({"a": {"messages": "{{ x }}"}, "b": {"messages": "y", "when": "x()"}}, "is not allowed"),
        (
            {"a": {"messages": "{{ x }}", "n": 2}, "b": {"continues": "a", "messages": "y"}},
            "Pick one in",
        ),
        ({"a": {"prompt": "{{ x }}"}, "b": {"continues": "a", "messages": "y"}}, "no turn can follow"),
        ({"a": {"messages": "{{ x }}"}, "b": {"continues": "a", "messages": "y", "adapter": "z"}}, "Leave it out"),
        ({"a": {"messages": "{{ x }}"}, "b": {"continues": "a", "prompt": "y"}}, "expected messages beside it"),
        ({f"s{i}": {"messages": "{{ x }}"} for i in range(33)}, "at most 32"),
    ],
)
def test_what_is_wrong_with_stages_is_said(stages: Any, said: str) -> None:
    with pytest.raises(JobRequestError, match=said):
        check(stages, ["id", "x"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draft": {"messages": "{{ bod }}"}}, "names 'bod'|names bod"),
        ({"judge": {"messages": "{{ draft.completion }} {{ fix }}"}}, "no stage before it"),
        ({"judge": {"adapter": "judge-v4", "messages": "{{ draft.completion }}"}}, "no such adapter"),
        ({"draft": {"messages": "{{ body"}}, "template"),
        ({"fix": {"messages": "Shorter.", "when": "bets.by < 1"}}, "names bets|names 'bets'"),
    ],
)
def test_names_that_nothing_has_are_refused(change: dict[str, Any], said: str) -> None:
    stages = {name: values | change.get(name, {}) for name, values in FLOW.items()}
    with pytest.raises((JobRequestError, ModelFilesError), match=said):
        check(stages, COLUMNS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_template": "{{ x }}"}, "each says what the prompts are"),
        ({"n": 3}, "n, stages"),
        ({"samples": "lists"}, "samples, stages"),
        ({"row_settings": ["seed"]}, "row_settings, stages"),
        ({"until": {"stage": "judge", "is": "1 > 0"}}, "expected stage, is and rounds"),
        ({"until": {"stage": "judge", "is": "1 > 0", "rounds": 1}}, "from 2 to 16"),
        ({"until": {"stage": "judge", "is": "f()", "rounds": 3}}, "is not allowed"),
    ],
)
def test_options_that_stages_take_the_place_of_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(JobRequestError, match=said):
        spec(FLOW, **options)


def test_wrong_stages_are_the_only_problem_of_what_belongs_to_them() -> None:
    stages = {"draft": {"messages": "{{ body }}", "max_token": 3}}
    with pytest.raises(JobRequestError) as refused:
        spec(stages, until={"stage": "draft", "is": "1 < 2", "rounds": 2}, output_columns=["draft"])
    assert len(refused.value.problems) == 1, refused.value.problems


def test_options_of_stages_without_stages_are_refused() -> None:
    with pytest.raises(JobRequestError, match="the job has none"):
        JobSpec(model="m", input="i", output="o", output_columns=["fix"])


@pytest.mark.parametrize(
    ("until", "repeated"),
    [
        ({"stage": "judge"}, {"draft", "judge"}),
        ({"stage": "best"}, {"draft", "judge", "best"}),
        ({"stage": "fix"}, {"draft", "judge", "best", "fix"}),
        ({"stage": "fix", "from": "judge"}, {"judge", "best", "fix"}),
    ],
)
def test_the_stages_that_run_again(until: dict[str, Any], repeated: set[str]) -> None:
    job = spec(FLOW, until={**until, "is": "body == 'x'", "rounds": 3})
    found = repeated_stages(until_of(job.until), stages_of(job.stages), COLUMNS)
    assert found == repeated
    assert named_stages(job, COLUMNS, {"judge-v3": "folder"})[1] == []


@pytest.mark.parametrize(
    ("until", "said"),
    [
        ({"stage": "jugde", "is": "1 < 2"}, "no such stage"),
        ({"stage": "judge", "is": "fix.completion == 'x'"}, "up to 'judge'"),
        ({"stage": "judge", "is": "1 < 2", "from": "fix"}, "comes after"),
    ],
)
def test_rounds_that_name_what_is_not_there_are_refused(until: dict[str, Any], said: str) -> None:
    job = spec(FLOW, until={**until, "rounds": 3})
    assert any(said in problem for problem in named_stages(job, COLUMNS, {"judge-v3": "folder"})[1])
