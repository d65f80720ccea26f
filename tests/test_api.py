"""`import lorabatch`: its names, its options and errors, which are the command line's. No job runs here."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import lorabatch
from lorabatch.cli import app
from lorabatch.console import option_types
from lorabatch.console.options import job_options
from lorabatch.engine.errors import EngineError
from lorabatch.engine.peft.audit import AdapterAudit
from lorabatch.jobs.agreement import Agreement
from lorabatch.jobs.errors import JobError
from lorabatch.jobs.options.types import JobOptions
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import JobStatus
from lorabatch.pipeline.result import JobResult, KindOfError

HEAVY = {"torch", "triton", "dask", "distributed", "pyarrow", "transformers", "pandas", "typer", "rich", "bokeh"}


def cli(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stderr


def test_every_public_name_is_listed_and_there() -> None:
    assert set(lorabatch.__all__) <= set(dir(lorabatch))
    found = {name: getattr(lorabatch, name) for name in lorabatch.__all__}
    assert (found["JobSpec"], found["JobResult"], found["JobStatus"]) == (JobSpec, JobResult, JobStatus)
    errors = [value for name, value in found.items() if name.endswith("Error")]
    assert len(errors) == 11
    assert all(issubclass(error, JobError | EngineError) for error in errors)
    assert all(found[name].__doc__ for name in found if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lorabatch.nothing  # noqa: B018


@pytest.mark.parametrize(
    "names", [["JobSpec"], ["run", "submit", "plan", "audit", "Job"], ["status", "JobFailedError"]]
)
def test_names_load_nothing_heavy(names: list[str]) -> None:
    code = f"import json, sys; from lorabatch import {', '.join(names)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(HEAVY), loaded & HEAVY


@pytest.mark.parametrize("function", [lorabatch.run, lorabatch.submit, lorabatch.plan])
def test_functions_show_the_options_of_the_command_line_with_their_defaults_and_help(function: Any) -> None:
    shown = inspect.signature(function).parameters
    assert job_options().keys() <= shown.keys()
    lines = (inspect.getdoc(function) or "").splitlines()
    for key, option in job_options().items():
        assert shown[key].default == (None if option.is_required else JobSpec.model_fields[key].default)
        assert f"    {key}: {JobSpec.model_fields[key].description}" in lines


@pytest.mark.parametrize(("function", "command"), [(lorabatch.audit, "audit"), (lorabatch.status, "status")])
def test_functions_without_a_job_have_the_options_of_their_commands(function: Any, command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    names = inspect.signature(function).parameters.keys() - {"adapters", "output"}
    assert "storage_options" in names
    assert all(f"--{name.replace('_', '-')}" in text for name in names)


@pytest.fixture
def given(weightless_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a job without weights, whose paths are `Path` objects."""
    pq.write_table(pa.table({"id": [1, 2], "prompt": ["one", "two"]}), tmp_path / "rows.parquet")
    return {
        "model": weightless_model,
        "input": [tmp_path / "rows.parquet"],
        "output": tmp_path / "out",
        "load_format": "dummy",
        "max_tokens": 8,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0, "polcy": "dlora"},
        {"adapters": "/no/such"},
        {"input": "/no/such.parquet"},
        {"columns": {"prompt": "text"}},
        {"max_errors": "lots", "stop": [""]},
    ],
    ids=lambda wrong: ",".join(wrong),
)
def test_a_wrong_request_raises_what_the_command_prints(given: dict[str, Any], wrong: dict[str, Any]) -> None:
    options = {**given, "input": str(given["input"][0])} | wrong
    job_file = given["output"].parent / "job.yaml"
    job_file.write_text(json.dumps(options, default=str))
    for name, call in (("run", lorabatch.run), ("submit", lorabatch.submit), ("plan", lorabatch.plan)):
        code, printed = cli(name, str(job_file))
        with pytest.raises(lorabatch.JobRequestError) as raised:
            call(**options)
        assert (code, printed) == (raised.value.exit_code, f"lorabatch: {raised.value}\n")
    assert not given["output"].exists()


def test_status_and_audit_raise_what_their_commands_print(tmp_path: Path) -> None:
    code, printed = cli("status", str(tmp_path))
    with pytest.raises(lorabatch.JobRequestError, match="no job there") as raised:
        lorabatch.status(tmp_path)
    assert (code, printed) == (2, f"lorabatch: {raised.value}\n")
    code, printed = cli("audit", str(tmp_path), "--model", str(tmp_path))
    with pytest.raises(lorabatch.EngineError) as refused:
        lorabatch.audit(tmp_path, model=tmp_path)
    assert (code, printed) == (2, f"lorabatch: {refused.value}\n")


def test_a_plan_is_what_the_command_prints(given: dict[str, Any], tmp_path: Path) -> None:
    spec = JobSpec(**given)
    found = lorabatch.plan(spec, workers=2, speeds=[1, 0.5], gpu_hour_price=3.6)
    assert (found.num_rows, found.num_errors, found.num_workers) == (2, 0, 2)
    assert not given["output"].exists()
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(spec.model_dump(mode="json", exclude_unset=True) | {"workers": 2}))
    words = ["plan", str(job_file), "--speeds", "1,0.5", "--gpu-hour-price", "3.6", "--json"]
    printed = json.loads(CliRunner().invoke(app, words).stdout)
    assert json.loads(json.dumps(found.to_json())) == printed
    assert found.price == printed["price"]
    assert "2 rows" in str(found)
    assert lorabatch.plan(job_file, speeds="1,0.5", gpu_hour_price=3.6).to_json() == found.to_json()


def test_options_beside_a_job_take_precedence(given: dict[str, Any]) -> None:
    found = lorabatch.plan(JobSpec(**given, seed=3), max_tokens=5, workers=1).details.spec
    assert (found.max_tokens, found.seed, found.workers) == (5, 3, 1)


def test_numbers_are_taken_where_text_is_expected(given: dict[str, Any]) -> None:
    spec = JobSpec(**given, max_errors=5, choice=[1, 2.5, "three"], name=2024, columns={"prompt": 7})
    assert (spec.max_errors, spec.choice, spec.name) == ("5", ("1", "2.5", "three"), "2024")
    assert spec.columns == {"prompt": "7"}
    assert JobSpec(**given, stop=0).stop == ("0",)
    wrong = [{"output": 3}, {"max_errors": 0.5}, {"choice": [True]}, {"max_errors": True}, {"stop": [None]}]
    for values in wrong:
        with pytest.raises(lorabatch.JobRequestError, match=rf"{list(values)[-1]}="):
            JobSpec(**given | values)


def test_values_of_other_libraries_are_taken_as_the_numbers_and_lists_that_they_are(given: dict[str, Any]) -> None:
    """A notebook has numbers and lists of numpy, pandas and Arrow."""
    spec = JobSpec(
        **given | {"max_tokens": np.int64(9), "output": Path("o")},
        max_errors=np.int64(5),
        name=np.int32(7),
        temperature=np.float32(0.5),
        choice=np.array(["a", "b"]),
        bad_words=pd.Series(["x", "y"]).unique(),
        stop_token_ids=pd.Index([1, 2]),
        keep=pa.array(["id"]),
        logit_bias={np.int64(5): np.float64(1)},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"maximum": np.int64(3)}}}],
        engine_threads=np.array(2),
    )
    assert (spec.max_tokens, spec.max_errors, spec.name, spec.temperature) == (9, "5", "7", 0.5)
    assert (spec.choice, spec.bad_words, spec.stop_token_ids) == (("a", "b"), ("x", "y"), (1, 2))
    assert (spec.keep, spec.logit_bias, spec.engine_threads) == (("id",), ((5, 1.0),), 2)
    assert spec.tools == '[{"type": "function", "function": {"name": "f", "parameters": {"maximum": 3}}}]'


@pytest.mark.parametrize("name", ["max_tokens", "seed", "temperature", "workers", "rows_per_shard"])
def test_a_switch_is_no_number(name: str, given: dict[str, Any]) -> None:
    """YAML reads `yes` as True, which would be 1."""
    with pytest.raises(lorabatch.JobRequestError, match=f"{name}='True': expected a valid (integer|number)"):
        JobSpec(**given | {name: True})
    assert JobSpec(**given, overwrite=True, chat=np.bool_(True)).chat is True


def test_the_type_of_the_options_is_made_from_the_spec() -> None:
    # after a change of an option: python -m lorabatch.console.option_types
    file = Path(lorabatch.__file__).parent / "jobs" / "options" / "types.py"
    assert file.read_text("utf-8") == option_types.source()
    assert JobOptions.__annotations__.keys() == JobSpec.model_fields.keys()


def test_a_type_checker_refuses_wrong_names_and_values_of_options(tmp_path: Path) -> None:
    right = """
import lorabatch
from pathlib import Path

paths = {"alpha": Path("a")}
lorabatch.run(model=Path("m"), adapters=paths, input=["a", Path("b")], output="o", max_errors=5, choice=[1, "x"])
lorabatch.plan("job.yaml", speeds=[1, 0.5], stop="x", logit_bias={5: 1.0}, json_schema={"type": "object"})
lorabatch.JobSpec(model="m", input="i", output="o", cluster_options={"queue": "gpu"}, n=2)
"""
    wrong = {
        "lorabatch.run(max_token=3)": 'Unexpected keyword argument "max_token" for "run"; did you mean "max_tokens"?',
        "lorabatch.submit(mode='fast')": 'Argument "mode" to "submit" has incompatible type',
        "lorabatch.plan(workers='two')": 'Argument "workers" to "plan" has incompatible type "str"',
        "lorabatch.JobSpec(modle='m')": 'Unexpected keyword argument "modle" for "JobSpec"',
    }
    file = tmp_path / "program.py"
    file.write_text(right + "\n".join(wrong) + "\n")
    # in the repository, whose cache `make types` has filled
    root = Path(lorabatch.__file__).parent
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", file]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    # with other versions than the pinned ones, our own files have errors, too
    errors = [line for line in done.stdout.splitlines() if re.search(r"program\.py:\d+: error: ", line)]
    assert len(errors) == len(wrong), done
    for line, said in zip(errors, wrong.values(), strict=True):
        assert said in line


def test_results_are_short_as_text_and_tables_as_html(given: dict[str, Any], tmp_path: Path) -> None:
    result = JobResult(
        "out<put>", "job-1", 12, 1, 3, 100, 50, (KindOfError("<b>bad</b>", 1, "a:1", "no\x1b[2J"),), (), 2.0, 0
    )
    audited = AdapterAudit("<i>x</i>", tmp_path, "refused", ("r is 0, expected at least 1. " * 30,), (), None)
    agreement = Agreement("job-1", "int8", 32, 30, 0.98, None)
    shown = [result, audited, agreement, lorabatch.plan(**given), lorabatch.Job("<u>out</u>", cluster="tcp://h:1")]
    assert repr(result) == "<JobResult: 12 rows, 1 error, 3 parts, 2.0 s, out<put>>"
    for found in shown:
        assert len(repr(found)) < 200, found
        assert repr(found).startswith(f"<{type(found).__name__}: ")
        html = found._repr_html_()
        assert html.startswith("<table>")
        assert not re.search(r"<(?!/?(table|caption|b|tbody|tr|th|td|br)\b)", html), html
        assert "\x1b" not in html
    assert "&lt;b&gt;bad&lt;/b&gt;" in result._repr_html_()
    assert "policy" not in repr(JobSpec(**given))
    assert "hush" not in repr(JobSpec(**given, storage_options={"key": "hush"}, cost_model="s3://u:hush@b/x"))


def test_names_of_the_package_are_its_functions_and_types() -> None:
    lorabatch.run  # noqa: B018 (loads its module)
    assert dir(lorabatch) == sorted(lorabatch.__all__)
    public = {name for name in dir(lorabatch.Job) if not name.startswith("_")}
    assert public == {
        *("cancel", "compare", "compare_with", "iter_rows", "job_id", "logs", "output", "result", "status", "wait"),
        *("to_arrow", "to_dask_dataframe", "to_pandas"),
    }
    offered = set(dir(JobSpec(model="m", input="i", output="o")))
    assert JobSpec.model_fields.keys() | {"sampling", "error_budget"} <= offered
    assert not offered & {"construct", "copy", "dict", "json", "parse_obj", "schema", "validate", "model_dump"}


def test_paths_are_options_too(given: dict[str, Any], tmp_path: Path) -> None:
    spec = JobSpec(**given, adapters={"alpha": tmp_path})
    assert (spec.input, spec.adapters) == (str(tmp_path / "rows.parquet"), {"alpha": str(tmp_path)})
