"""Bad requests: every problem named at once, before anything is written."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.input.files import unpack_schema
from lorabatch.jobs.opening.validation import check_job, requested_job
from lorabatch.jobs.spec import JobSpec


@pytest.fixture
def given(weightless_model: Path, tmp_path: Path) -> dict[str, Any]:
    """A request that is right."""
    pq.write_table(pa.table({"id": [1], "adapter": ["x"], "prompt": ["a"]}), tmp_path / "in.parquet")
    shutil.copytree(weightless_model, tmp_path / "model")
    return {
        "model": str(tmp_path / "model"),
        "input": str(tmp_path / "in.parquet"),
        "output": str(tmp_path / "out"),
        "load_format": "dummy",
        "max_tokens": 8,
    }


def problems(given: dict[str, Any], **changes: Any) -> list[str]:
    output = Path(given["output"])
    before = sorted(output.rglob("*"))
    with pytest.raises(JobRequestError) as caught:
        check_job(JobSpec(**given | changes))
    assert sorted(output.rglob("*")) == before, "a refused request left something in its output"
    return list(caught.value.problems)


def test_a_right_request_says_what_it_found(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapters" / "x").mkdir(parents=True)
    checked = check_job(JobSpec(**given, adapters=str(tmp_path / "adapters")))
    assert checked.adapters == {"x": str(tmp_path / "adapters" / "x")}
    assert checked.model.config.max_context_tokens == 128
    assert checked.input.num_rows == 1
    assert checked.input.roles == {"id": "id", "adapter": "adapter", "prompt": "prompt"}
    assert checked.output.is_empty
    assert not (tmp_path / "out").exists()


def test_all_parts_of_a_request_are_looked_at_before_it_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    found = problems(
        given,
        model=str(tmp_path / "no-model"),
        adapters=str(tmp_path / "no-adapters"),
        input=str(tmp_path / "no-input"),
    )
    assert len(found) == 4
    for part in ("model='", "adapters='", "input='", "thesis.tex"):
        assert any(part in problem for problem in found), part


def test_problems_of_values_are_reported_with_those_of_places(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    changes = {"max_tokens": 0, "workers": 0, "input": str(tmp_path / "no-input"), "output": str(tmp_path / "file")}
    with pytest.raises(JobRequestError) as caught:
        requested_job(given | changes)
    found = caught.value.problems
    assert len(found) == 4
    for part in ("max_tokens=0", "workers=0", "no-input': not found", "file': cannot write to"):
        assert any(part in problem for problem in found), part


def test_places_are_not_looked_at_where_the_values_needed_for_it_are_wrong(given: dict[str, Any]) -> None:
    def found(**changes: Any) -> tuple[str, ...]:
        with pytest.raises(JobRequestError) as caught:
            requested_job(given | changes)
        return caught.value.problems

    assert len(found(storage_options="{", input="s3://bucket/in.parquet")) == 1
    assert len(found(temperature=-1, model="some-owner/some-model")) == 1
    assert len(found(input="", columns={"prompt": "nowhere"})) == 1


def test_a_job_file_and_options_make_one_request(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(given))
    assert requested_job({"max-tokens": 3}, tmp_path / "job.yaml") == JobSpec(**given | {"max_tokens": 3})


def test_an_output_that_is_a_file_or_is_below_one_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(JobRequestError, match=r"output='.*/file.*': cannot write to .* expected a folder"):
            check_job(JobSpec(**given | {"output": str(output)}))


def test_an_output_among_the_input_files_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    (problem,) = problems(given, input=str(tmp_path), output=str(tmp_path / "answers"))
    assert "would be among the files of input=" in problem
    check_job(JobSpec(**given | {"input": str(tmp_path / "*.parquet"), "output": str(tmp_path / "answers")}))


def test_relative_paths_mean_the_working_directory(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = check_job(JobSpec(model="model", input="in.parquet", output="out", load_format="dummy", max_tokens=8))
    assert checked.spec.model == given["model"]
    assert checked.store.url == given["output"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (pa.table({"text": ["a"]}), "no prompt column"),
        (pa.table({"prompt": [1]}), "type int64, expected string"),
        (pa.table({"prompt": ["a"], "messages": ["[]"]}), "one kind of prompt"),
        (pa.table({"prompt": ["a"], "error": ["b"]}), "'error': the output has a column of that name"),
        (pa.table({"prompt": ["a"], "completion": ["b"], "mode": ["c"]}), "columns 'completion', 'mode'"),
        (pa.table({"prompt": ["a"], "__lb_tokens": [1]}), "'__lb_tokens'"),
        (pa.table({"prompt": ["a"], "tools": ["x"], "sampling_params": [{"best_of": 2}]}), "'best_of' is no setting"),
    ],
)
def test_inputs_with_the_wrong_columns_are_refused(given: dict[str, Any], table: pa.Table, expected: str) -> None:
    pq.write_table(table, given["input"])
    (problem,) = problems(given)
    assert expected in problem


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral': not supported"),
        ({"model_type": "llama"}, "vocab_size: missing, expected a positive number"),
        (None, "config.json: missing"),
        ("{", "config.json: not valid JSON"),
    ],
)
def test_models_that_cannot_be_served_are_refused(given: dict[str, Any], config: Any, expected: str) -> None:
    path = Path(given["model"]) / "config.json"
    if config is None:
        path.unlink()
    else:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    (problem,) = problems(given)
    assert expected in problem


def test_a_model_without_weights_or_tokenizer_is_refused(given: dict[str, Any]) -> None:
    (problem,) = problems(given, load_format="auto")
    assert "no *.safetensors files" in problem
    (Path(given["model"]) / "tokenizer.json").unlink()
    (problem,) = problems(given)
    assert "tokenizer.json: missing" in problem


def test_messages_need_a_chat_template(given: dict[str, Any]) -> None:
    pq.write_table(pa.table({"messages": ['[{"role": "user", "content": "x"}]']}), given["input"])
    check_job(JobSpec(**given))
    (Path(given["model"]) / "chat_template.jinja").unlink()
    (problem,) = problems(given)
    assert "has no chat template" in problem


def test_a_system_prompt_needs_messages_and_a_template_that_keeps_it(given: dict[str, Any]) -> None:
    for column, values in (("prompt", ["x"]), ("prompt_token_ids", [[1]])):
        pq.write_table(pa.table({column: values}), given["input"])
        (problem,) = problems(given, system_prompt="Be brief.")
        assert f"system_prompt: the prompts of this input are in column {column!r}" in problem
    pq.write_table(pa.table({"messages": ['[{"role": "user", "content": "x"}]']}), given["input"])
    check_job(JobSpec(**given, system_prompt="Be brief."))
    template = Path(given["model"]) / "chat_template.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    (problem,) = problems(given, system_prompt="Be brief.")
    assert "the chat template leaves out the text of messages[0] (role 'system')" in problem
    template.write_text("{{ raise_exception('System role not supported') }}")
    (problem,) = problems(given, system_prompt="Be brief.")
    assert "System role not supported" in problem
    with pytest.raises(JobRequestError, match="system_prompt='': expected text that is not empty"):
        JobSpec(**given, system_prompt="")


TOOL = {"type": "function", "function": {"name": "f"}}
WITH_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}{{ mood }}"


def test_what_is_given_to_templates_needs_messages(given: dict[str, Any]) -> None:
    (problem,) = problems(given, tools=[TOOL], continue_final_message=True, chat_template=WITH_TOOLS)
    asked = "chat_template, tools, continue_final_message"
    assert problem.startswith(f"{asked}: the prompts of this input are in column 'prompt', which no chat template")


def test_tools_and_variables_that_the_template_does_not_have_are_refused_at_once(given: dict[str, Any]) -> None:
    pq.write_table(pa.table({"messages": ['[{"role": "user", "content": "x"}]']}), given["input"])
    (problem,) = problems(given, tools=[TOOL])
    assert problem.startswith("tools: the chat template leaves out the tool 'f': give one that has it.")
    (problem,) = problems(given, chat_template_kwargs={"moody": 1}, chat_template=WITH_TOOLS)
    assert problem.startswith("chat_template_kwargs: the chat template has no variable 'moody'")
    both = {"tools": json.dumps([TOOL]), "chat_template_kwargs": '{"mood": 1}'}
    assert check_job(JobSpec(**given, **both, chat_template=WITH_TOOLS)).model.tokenizer.has_chat_template


def test_a_chat_template_is_a_file_a_url_or_text_and_its_text_is_the_job_s(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"messages": ['[{"role": "user", "content": "x"}]']}), given["input"])
    (tmp_path / "own.jinja").write_text(WITH_TOOLS)
    fsspec.filesystem("memory").pipe_file("/templates/own.jinja", WITH_TOOLS.encode())
    monkeypatch.chdir(tmp_path)
    for place in (WITH_TOOLS, "own.jinja", "memory://templates/own.jinja", f"file://{tmp_path}/own.jinja"):
        checked = check_job(JobSpec(**given, chat_template=place))
        assert checked.spec.chat_template == WITH_TOOLS
        assert checked.model.tokenizer.render([{"role": "user", "content": "x"}]) == "x"
    (problem,) = problems(given, chat_template="gone.jinja")
    assert problem.startswith(f"chat_template='{tmp_path}"[:40])
    (problem,) = problems(given, chat_template="{% for %}")
    assert problem.startswith("chat_template='{% for %}': chat template: not a valid jinja2 template")
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    (problem,) = problems(given, chat_template="own.jinja")
    assert "codec can't decode" in problem


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tools": "["}, "tools='[': not JSON ("),
        ({"tools": [{"name": "f"}]}, "tools[0].type=None: expected 'function'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: set by the renderer."),
        ({"add_generation_prompt": True, "continue_final_message": True}, "a prompt ends with one of the two."),
        ({"reasoning_markers": "<think>"}, "reasoning_markers=<think>: expected START,END such as <think>,</think>"),
        ({"reasoning_markers": {"start": "a,b", "end": "c"}}, "expected a start marker without a comma"),
        ({"tool_call_parser": "pythonic"}, "tool_call_parser=pythonic: expected one of hermes, llama3, mistral"),
    ],
)
def test_options_of_templates_and_answers_are_checked_when_a_job_is_made(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobRequestError) as caught:
        JobSpec(model="m", input="i", output="o", **values)
    assert problem in str(caught.value)


def test_options_are_the_same_however_they_are_written() -> None:
    basics = {"model": "m", "input": "i", "output": "o"}
    forms: list[dict[str, Any]] = [
        {"tools": [TOOL], "chat_template_kwargs": {"a": None}, "reasoning_markers": {"start": "<t>", "end": "</t>"}},
        {"tools": json.dumps([TOOL]), "chat_template_kwargs": '{"a": null}', "reasoning_markers": ["<t>", "</t>"]},
    ]
    one, other = (JobSpec(**basics, **form) for form in forms)
    assert one == other == JobSpec(**one.model_dump())
    assert one.sampling.reasoning == ("<t>", "</t>")
    assert JobSpec(**basics, reasoning_markers={"end": "</t>"}).sampling.reasoning == ("", "</t>")


def test_max_tokens_must_leave_room_for_a_prompt(given: dict[str, Any]) -> None:
    (problem,) = problems(given, max_tokens=128)
    assert "max_tokens=128: leaves no room for a prompt" in problem
    pq.write_table(pa.table({"prompt": ["a"], "max_tokens": [5]}), given["input"])
    check_job(JobSpec(**given | {"max_tokens": 128, "row_settings": "max_tokens"}))


def test_adapters_that_no_row_can_name_are_refused_with_the_columns_that_look_like_it(
    given: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    adapters = str(tmp_path / "adapters")
    table = pa.table({"prompt": ["a", "b", "x", "y"], "tenant": ["a", "b", None, "c"], "note": ["c", "q", "q", "q"]})
    pq.write_table(table, given["input"], row_group_size=1)
    (problem,) = problems(given, adapters=adapters)
    assert problem == (
        "adapters: 3 adapters are given, and no row can name one: the input has no column 'adapter'. "
        "`tenant` holds 3 of the 3 adapter names: add --column adapter=tenant. "
        "`prompt` holds 2 of the 3 adapter names: add --column adapter=prompt. "
        "`note` holds 1 of the 3 adapter names: add --column adapter=note."
    )
    check_job(JobSpec(**given, adapters=adapters, columns={"adapter": "tenant"}))
    pq.write_table(pa.table({"prompt": ["x"]}), given["input"])
    (problem,) = problems(given, adapters=adapters)
    assert "No column holds one of their names. Name the column with --column adapter=NAME" in problem
    check_job(JobSpec(**given))


def test_the_only_adapter_answers_the_rows_of_an_input_that_names_none(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    adapters = {"a": str(tmp_path / "adapters" / "a")}
    pq.write_table(pa.table({"prompt": ["x", "y"], "note": ["q", None]}), given["input"])
    checked = check_job(JobSpec(**given, adapters=adapters, keep=("note",)))
    assert (checked.input.sole_adapter, checked.input.roles["adapter"]) == ("a", "adapter")
    assert [file.partition for file in checked.input.files] == [{"adapter": "a"}]
    assert unpack_schema(checked.input.schema_ipc).field("adapter").type == pa.string()
    # with another name it is another input, and with a column of its own it is that column
    renamed = check_job(JobSpec(**given, adapters={"b": adapters["a"]}))
    assert renamed.input != checked.input
    pq.write_table(pa.table({"prompt": ["x"], "adapter": pa.array([None], pa.string())}), given["input"])
    assert check_job(JobSpec(**given, adapters=adapters)).input.sole_adapter == ""
    # a column that has the name is likelier meant
    pq.write_table(pa.table({"prompt": ["x", "y"], "tenant": ["a", "b"]}), given["input"])
    (problem,) = problems(given, adapters=adapters)
    assert "`tenant` holds 1 of the 1 adapter names: add --column adapter=tenant." in problem


def test_a_role_that_is_given_to_nothing_leaves_its_column_as_data(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapters" / "judge").mkdir(parents=True)
    adapters = {"judge": str(tmp_path / "adapters" / "judge")}
    pq.write_table(pa.table({"prompt": ["x", "y"], "adapter": ["a", "judge"]}), given["input"])
    job = given | {"columns": ["adapter="]}
    checked = check_job(JobSpec(**job))
    assert "adapter" not in checked.input.roles
    assert "adapter" in unpack_schema(checked.input.schema_ipc).names
    assert check_job(JobSpec(**given)).input.roles["adapter"] == "adapter"
    # the only adapter answers all rows, and its name stands beside the data
    (problem,) = problems(job, adapters=adapters)
    assert "column 'adapter' of the input is data" in problem
    checked = check_job(JobSpec(**job, adapters=adapters, output_prefix="judge_"))
    assert checked.input.roles["adapter"] == "judge_adapter"
    assert [file.partition for file in checked.input.files] == [{"judge_adapter": "judge"}]
    assert JobSpec(**given | {"columns": {"adapter": None}}).columns == {"adapter": ""}


def test_a_folder_name_may_be_the_adapters_name(given: dict[str, Any], tmp_path: Path) -> None:
    for number in ("1", "2"):
        (tmp_path / "adapters" / number).mkdir(parents=True)
        (tmp_path / "rows" / f"tenant={number}").mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "rows" / f"tenant={number}" / "x.parquet")
    job = given | {"input": str(tmp_path / "rows"), "adapters": str(tmp_path / "adapters")}
    (problem,) = problems(job)
    assert "`tenant` holds 2 of the 2 adapter names: add --column adapter=tenant." in problem
    checked = check_job(JobSpec(**job, columns={"adapter": "tenant"}))
    assert [file.partition for file in checked.input.files] == [{"tenant": "1"}, {"tenant": "2"}]


def test_an_input_without_rows_is_a_valid_job(given: dict[str, Any]) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), given["input"])
    assert check_job(JobSpec(**given)).input.num_rows == 0


def test_an_output_with_strangers_files_is_refused_with_and_without_overwrite(given: dict[str, Any]) -> None:
    output = Path(given["output"])
    output.mkdir()
    (output / "part-00000.parquet").write_bytes(b"another tool's")
    for overwrite in (False, True):
        (problem,) = problems(given, overwrite=overwrite)
        assert "1 files that are not this job's (part-00000.parquet)" in problem


def test_storage_that_refuses_or_has_no_such_bucket_is_said_at_once(
    given: dict[str, Any], s3_options: dict[str, Any]
) -> None:
    found = problems(given, input="s3://no-such-bucket/in.parquet", output="zzz://x/out", storage_options=s3_options)
    assert any("input='s3://no-such-bucket/in.parquet'" in problem and "not found" in problem for problem in found)
    assert any("zzz" in problem for problem in found)
    assert "very-secret" not in str(found)


def test_credentials_that_the_server_refuses_are_said_and_not_shown(
    given: dict[str, Any], s3_options: dict[str, Any]
) -> None:
    endpoint = s3_options["client_kwargs"]["endpoint_url"]
    fsspec.filesystem("s3", **s3_options).mkdir("guarded")

    def guard(num_free_requests: str) -> None:
        asked = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", num_free_requests.encode())
        asked.add_header("Content-Type", "text/plain")
        with urllib.request.urlopen(asked):
            pass

    guard("0")
    try:
        found = problems(
            given,
            input="s3://guarded/in.parquet",
            adapters="s3://guarded/adapters",
            output="s3://guarded/out",
            storage_options=s3_options,
        )
    finally:
        guard("inf")
    assert len(found) == 3
    assert all("access was refused" in problem for problem in found)
    assert s3_options["secret"] not in str(found)
    assert s3_options["key"] not in str(found)
