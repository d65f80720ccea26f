"""The examples for workflow tools and notebooks, run by the tools themselves: each is in an environment of its own.

`make test-all` installs them. `LORABATCH_TOOLS` names another folder of such environments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lorabatch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TOOLS = Path(os.environ.get("LORABATCH_TOOLS", Path(sys.prefix) / "tools"))
DAY = "2026-11-21"
NUM_ROWS = 6


def tool(name: str, command: str) -> str:
    """A command of a tool. Skips the test where the tool is not installed."""
    path = TOOLS / name / "bin" / command
    if not path.exists():
        pytest.skip(f"{name} is not installed in {TOOLS}; `make test-all` does that")
    return str(path)


@pytest.fixture
def data(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the examples read: a job file, and the prompts of one day. Homes of tools are in this folder too."""
    folder = tmp_path / "data"
    (folder / "prompts" / DAY).mkdir(parents=True)
    rows = {"id": range(NUM_ROWS), "adapter": ["rank1", None] * (NUM_ROWS // 2), "prompt": ["quick"] * NUM_ROWS}
    pq.write_table(pa.table(rows), folder / "prompts" / DAY / "rows.parquet")
    adapters = str(next(iter(tiny_adapters.values())).parent)
    job = {"model": str(tiny_llama), "adapters": adapters, "workers": 1, "max_tokens": 4}
    (folder / "job.yaml").write_text(json.dumps(job))
    settings = {
        "HOME": tmp_path / "home",
        "LORABATCH_DATA": folder,
        "LORABATCH_PYTHON": sys.executable,
        "AIRFLOW_HOME": tmp_path / "airflow",
        "AIRFLOW__CORE__DAGS_FOLDER": EXAMPLES,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "DAGSTER_HOME": tmp_path / "dagster",
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "PREFECT_HOME": tmp_path / "prefect",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # on a busy machine its server takes minutes
        "DO_NOT_TRACK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    for name in ("home", "airflow", "dagster", "prefect"):
        (tmp_path / name).mkdir()
    return folder


def call(*words: str | Path, folder: Path) -> str:
    """Run a command that must succeed; what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_answered(data: Path) -> None:
    job = lorabatch.Job(data / "answers" / DAY)
    assert job.status().headline == "done"
    assert sorted(job.to_arrow().column("id").to_pylist()) == list(range(NUM_ROWS))


@pytest.mark.long
def test_airflow_runs_its_example(data: Path, tmp_path: Path) -> None:
    airflow = tool("airflow", "airflow")
    call(airflow, "db", "migrate", folder=tmp_path)
    printed = call(airflow, "dags", "test", "nightly_answers", DAY, folder=tmp_path)
    assert f"{NUM_ROWS} rows, 0 errors: {data}/answers/{DAY}" in printed
    assert_answered(data)


@pytest.mark.long
def test_dagster_materializes_its_example(data: Path, tmp_path: Path) -> None:
    dagster = tool("dagster", "dagster")
    words = ("asset", "materialize", "-f", EXAMPLES / "dagster_assets.py", "--select", "answers", "--partition", DAY)
    printed = call(dagster, *words, folder=tmp_path)
    assert f"done: {NUM_ROWS} of {NUM_ROWS} rows" in printed
    assert_answered(data)


@pytest.mark.long
def test_prefect_runs_its_example(data: Path, tmp_path: Path, background: Path) -> None:
    python = tool("prefect", "python")
    printed = call(python, EXAMPLES / "prefect_flow.py", DAY, folder=tmp_path)
    assert printed.splitlines()[0] == str(data / "answers" / DAY)
    assert_answered(data)


@pytest.mark.long
def test_snakemake_runs_its_example_and_has_nothing_to_do_the_second_time(data: Path, tmp_path: Path) -> None:
    snakemake = tool("snakemake", "snakemake")
    words = (snakemake, "-s", EXAMPLES / "Snakefile", "--cores", "1", "--config", f"data={data}")
    call(*words, folder=tmp_path)
    assert_answered(data)
    assert "Nothing to be done" in call(*words, folder=tmp_path)
    shutil.rmtree(data / "answers")
    (data / "job.yaml").write_text("model: nothing")
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=500)
    assert done.returncode == 1
    assert "model='nothing'" in (data / "logs" / f"{DAY}.log").read_text()


@pytest.mark.long
def test_progress_in_a_notebook_is_one_output_of_the_cell_that_is_replaced(data: Path, tmp_path: Path) -> None:
    execute = tool("notebook", "jupyter-execute")
    prompts, answers = f"{data}/prompts/{DAY}", f"{data}/answers/{DAY}"
    code = f"import lorabatch\nlorabatch.run('{data}/job.yaml', input={prompts!r}, output={answers!r}).num_rows"
    cell = {"cell_type": "code", "id": "0", "source": code, "metadata": {}, "outputs": [], "execution_count": None}
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    call(execute, "--inplace", notebook, folder=tmp_path)
    assert_answered(data)
    outputs = json.loads(notebook.read_text())["cells"][0]["outputs"]
    shown = ["".join(output.get("data", output)["text/plain"]) for output in outputs]
    assert shown.count(str(NUM_ROWS)) == 1
    assert [f"{NUM_ROWS} of {NUM_ROWS} rows answered" in text for text in shown].count(True) == 1
    assert not any("starting" in text for text in shown)
