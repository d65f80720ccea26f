"""How a job makes its prompts is checked before it starts: templates, names of columns, chat and system prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lorabatch.jobs.errors import JobRequestError, OutputConflictError
from lorabatch.jobs.opening.opened_job import make_record, open_job
from lorabatch.jobs.opening.validation import CheckedJob, check_job, requested_job
from lorabatch.jobs.record import differences, index_key
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.notes import job_notes

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ question }}"}]


@pytest.fixture
def given(weightless_model: Path, tmp_path: Path) -> dict[str, Any]:
    """A request for a table of questions, still without a prompt."""
    table = {"id": [1], "question": ["a"], "context": ["b"], "Long name": ["c"]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    return {
        "model": str(weightless_model),
        "input": str(tmp_path / "in.parquet"),
        "output": str(tmp_path / "out"),
        "load_format": "dummy",
        "max_tokens": 8,
    }


@pytest.fixture
def base_model(weightless_model: Path, tmp_path: Path) -> str:
    """The model without its chat template."""
    folder = shutil.copytree(weightless_model, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    return str(folder)


def checked(given: dict[str, Any], **changes: Any) -> CheckedJob:
    return check_job(JobSpec(**given | changes))


def problems(given: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(JobRequestError) as caught:
        checked(given, **changes)
    assert not Path(given["output"]).exists()
    return list(caught.value.problems)


def test_columns_that_a_template_names_are_recorded_and_read_also_where_they_are_dropped(given: dict[str, Any]) -> None:
    found = checked(given, prompt_template="{{ context }} {{ row['Long name'] }}", drop=["context"]).input
    assert found.template_columns == ("Long name", "context")
    assert found.roles == {"id": "id"}
    assert found.dropped == ("context",)
    both = checked(given, messages_template=[*MESSAGES, {"role": "user", "content": "{{ context }}"}]).input
    assert both.template_columns == ("context", "question")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_template": "{{ questoin }}"}, "prompt_template: names 'questoin', which no column of the input has"),
        ({"prompt_template": "{{ xyz }}{{ question }}"}, "which no column of the input has; the columns are id, "),
        ({"prompt_template": "{{ row['Lang name'] }}"}, "did you mean 'Long name'?"),
        ({"prompt_template": "a\n{% if question %}"}, "line 2: Unexpected end of template"),
        ({"prompt_template": "no-such-file.jinja"}, "No such file or directory. Name a file with a jinja2 template"),
        ({"prompt_template": "{% raw %}x{% endraw %}"}, "prompt_template: names no column"),
        ({"messages_template": [*MESSAGES, {"role": "user", "content": "{{ q }}"}]}, "messages_template[2].content: n"),
        ({"messages_template": [{"role": "user", "content": "{{ question }"}]}, "messages_template[0].content="),
        ({"messages_template": [{"role": "user"}]}, "messages_template[0]="),
        ({"prompt_template": "{{ question }}", "messages_template": MESSAGES}, "each says what the prompts are"),
        ({"prompt_template": "{{ question }}", "columns": {"prompt": "context"}}, "each says what the prompts are"),
        ({"messages_template": MESSAGES, "chat": False}, "chat=False, messages_template: messages are rendered"),
        (
            {"prompt_template": "{{ question }}", "chat": False, "system_prompt": "s"},
            "system_prompt: the prompts of prompt_template are text, where a system message has no place",
        ),
        (
            {"prompt_template": "{{ question }}", "chat": False, "tools": "[]"},
            "tools: the prompts of prompt_template are text, which no chat template renders",
        ),
        ({"columns": {"prompt": "question"}, "system_prompt": "s"}, "or make each a user message with --chat"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_made_are_refused_by_name(
    given: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    (problem,) = problems(given, **changes)
    assert said in problem


def test_a_model_without_a_chat_template_gets_text_unless_messages_are_asked_for(
    given: dict[str, Any], base_model: str
) -> None:
    on_base = given | {"model": base_model}
    assert checked(given, prompt_template="{{ question }}").spec.chat is True
    assert checked(on_base, prompt_template="{{ question }}").spec.chat is False
    for changes, option in (
        ({"prompt_template": "{{ question }}", "chat": True}, "chat=True"),
        ({"columns": {"prompt": "question"}, "chat": True}, "chat=True"),
        ({"messages_template": MESSAGES}, "messages_template"),
    ):
        (problem,) = problems(on_base, **changes)
        assert problem.startswith(f"{option}: the model at ")
        assert "has no chat template" in problem


def test_chat_is_refused_where_it_means_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    table = {"messages": ["[]"], "tokens": [[1]], "prompt": ["x"]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    (problem,) = problems(given, columns={"messages": "messages"}, chat=False)
    assert problem.startswith("chat=False: column 'messages' has messages")
    (problem,) = problems(given, columns={"prompt_token_ids": "tokens"}, chat=True)
    assert problem.startswith("chat=True: column 'tokens' has tokens")
    assert checked(given, columns={"messages": "messages"}, chat=True).spec.chat is None
    assert checked(given, columns={"prompt": "prompt"}, chat=False).spec.chat is None


def test_a_broken_template_does_not_hide_other_problems(given: dict[str, Any]) -> None:
    found = problems(given, prompt_template="{{", model="no-model", drop=["nosuch"])
    assert len(found) == 3
    for part in ("prompt_template=", "no-model", "drop='nosuch'"):
        assert any(part in problem for problem in found), part


def test_a_file_and_its_text_are_one_job_and_another_text_is_another(given: dict[str, Any], tmp_path: Path) -> None:
    text = 'Q: {{ question | replace("\\n", " ") }}\n{{ context }}'
    (tmp_path / "prompt.jinja").write_text(f"{text}\n")
    written_out = text.replace("\\n", "\\\\n").replace("\n", "\\n")
    jobs = [
        make_record(checked(given, prompt_template=template))
        for template in (str(tmp_path / "prompt.jinja"), f"file://{tmp_path}/prompt.jinja", written_out)
    ]
    assert {job.spec.templates for job in jobs} == {(("user", text),)}
    assert differences(jobs[0], jobs[1]) == differences(jobs[0], jobs[2]) == []
    # Resumed from its record, it is the same job.
    again = make_record(check_job(jobs[0].job_spec()))
    assert differences(jobs[0], again) == []
    assert again.spec.templates == jobs[0].spec.templates
    other = make_record(checked(given, prompt_template=f"{text}\\n"))
    assert [line.partition(":")[0] for line in differences(jobs[0], other)] == ["prompt_template"]
    assert index_key(other) != index_key(jobs[0])
    text_only = make_record(checked(given, prompt_template=written_out, chat=False))
    assert [line.partition(":")[0] for line in differences(jobs[0], text_only)] == ["chat"]


def test_the_same_command_goes_on_and_another_template_is_refused(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given, prompt_template=r"{{ question }}\n", system_prompt="s"))
    again = open_job(JobSpec(**given, prompt_template=r"{{ question }}\n", system_prompt="s"))
    assert again.record.job_id == first.record.job_id
    assert open_job(first.record.job_spec()).record.job_id == first.record.job_id
    with pytest.raises(OutputConflictError, match="prompt_template: was "):
        open_job(JobSpec(**given, prompt_template="{{ question }}", system_prompt="s"))


def test_a_job_file_has_templates_as_lists_and_blocks(given: dict[str, Any], tmp_path: Path) -> None:
    messages = (
        "messages_template:\n- {role: system, content: s}\n- role: user\n  content: |-\n    {{ question }}\n    end\n"
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(given) + messages)
    spec = check_job(requested_job({}, tmp_path / "job.yaml")).spec
    assert spec.templates == (("system", "s"), ("user", "{{ question }}\nend"))
    assert json.loads(spec.messages_template or "")[1] == {"role": "user", "content": "{{ question }}\nend"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(given) + "prompt_template: '{{ question }}\\n!'\nchat: false\n")
    spec = check_job(requested_job({}, tmp_path / "job.yaml")).spec
    assert (spec.templates, spec.chat) == ((("user", "{{ question }}\n!"),), False)


def test_tables_of_trl_run_and_say_how_their_columns_are_called(given: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "completion": ["gold"]})
    pq.write_table(table, tmp_path / "in.parquet")
    record = make_record(checked(given))
    assert record.spec.output_prefix == "answer_"
    assert (
        "input: completion is a column of the input; names of the output's own columns begin with answer_: "
        "answer_completion"
    ) in job_notes(record)
    assert differences(record, make_record(check_job(record.job_spec()))) == []
    assert checked(given, prompt_template="{{ prompt }}").spec.output_prefix == "answer_"
    assert checked(given, drop=["completion"]).spec.output_prefix == ""
    (problem,) = problems(given, output_prefix="")
    assert "--output-prefix answer_" in problem
    more = table.append_column("answer_mode", pa.array(["x"]))
    pq.write_table(more, tmp_path / "in.parquet")
    assert checked(given).spec.output_prefix == "answer2_"
    pq.write_table(table.append_column("error", pa.array(["x"])), tmp_path / "in.parquet")
    (problem,) = problems(given)
    assert "input columns 'completion', 'error'" in problem


@pytest.mark.parametrize(
    ("name", "turn", "expected"),
    [
        ("conversations", {"from": "human", "value": "a"}, "ShareGPT's conversations (from, value)"),
        ("prompt", {"role": "user", "content": "a"}, "lists of messages"),
    ],
)
def test_conversations_of_other_projects_are_read_and_the_notes_say_so(
    given: dict[str, Any], tmp_path: Path, name: str, turn: dict[str, str], expected: str
) -> None:
    pq.write_table(pa.table({name: [[turn]], "completion": [["x"]]}), tmp_path / "in.parquet")
    record = make_record(checked(given))
    assert record.input.roles["messages"] == name
    assert record.renders_messages
    assert record.spec.output_prefix == "answer_"
    note = f"input: column {name!r} holds {expected} and is read as messages"
    assert note in job_notes(record)
    assert differences(record, make_record(check_job(record.job_spec()))) == []
    # A user who says it needs no note, and one who says otherwise gets what they say.
    assert note not in job_notes(make_record(checked(given, columns={"messages": name})))
    made = make_record(checked(given, prompt_template=f"{{{{ {name}[0].{next(iter(turn))} }}}}"))
    assert "messages" not in made.input.roles
    pq.write_table(pa.table({name: [[turn]], "system": ["be brief"]}), tmp_path / "in.parquet")
    (problem,) = problems(given)
    assert f"add --column messages={name}" in problem
