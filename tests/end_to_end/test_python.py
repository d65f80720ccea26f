"""The Python functions on real clusters: examples of `docs/guides/python.md`, handles on jobs that end in every way."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from echo_job import ECHO_FACTORY, EchoJob, Watcher, make_rows, wait_until

import lorabatch
from lorabatch.jobs.status.logs import log_lines
from lorabatch.pipeline import run, submit

ROOT = Path(__file__).parents[2]
_EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
DOCUMENTED = [lorabatch.run, lorabatch.submit, lorabatch.plan, lorabatch.status, lorabatch.audit, lorabatch.Job]


@pytest.fixture
def small_job(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working directory with what the examples name: `base`, `adapters` and `prompts.parquet`."""
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(tiny_llama)
    for seed, name in enumerate(("formal", "pirate")):
        make_adapter(tmp_path / "adapters" / name, tiny_llama, seed=seed)
    messages = [[{"role": "user", "content": f"number {i}"}] for i in range(12)]
    names = [(None, "formal", "pirate")[i % 3] for i in range(12)]
    pq.write_table(pa.table({"id": range(12), "adapter": names, "messages": messages}), "prompts.parquet")


@pytest.mark.long
def test_the_examples_of_the_document_and_of_the_functions_are_true(small_job: None, background: Path) -> None:
    examples = _EXAMPLE.findall((ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8"))
    assert len(examples) >= 7
    names: dict[str, Any] = {}
    for code, expected in examples:
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(code, "docs/guides/python.md", "exec"), names)
        assert printed.getvalue() == expected, code
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for documented in DOCUMENTED:
        text = inspect.getdoc(documented)
        assert text is not None
        example = parser.get_doctest(text, {"lorabatch": lorabatch}, documented.__name__, None, None)
        assert example.examples
        assert runner.run(example).failed == 0


@pytest.fixture
def echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of the Python functions have echo engines."""
    assert run.run.__kwdefaults__ is not None
    monkeypatch.setitem(run.run.__kwdefaults__, "engine_factory", ECHO_FACTORY)
    monkeypatch.setattr(submit.submit, "__defaults__", (ECHO_FACTORY, None))


# Dask's, which it has not brought up to date with pandas yet.
DASK_FRAMES = pytest.mark.filterwarnings("ignore:The inplace keyword")


def held_rows(echo_job: EchoJob, num_rows: int, step_s: float) -> tuple[list[dict[str, Any]], Path]:
    """Rows of the job's input, and the file without which its engines answer none of them."""
    rows = make_rows(num_rows)
    echo_job.write_input(rows)
    gate = echo_job.folder / "gate"
    echo_job.set_engine(step_s=step_s, gate=str(gate))
    return rows, gate


@DASK_FRAMES
def test_a_submitted_job_is_followed_and_read_by_its_handle(
    echo_job: EchoJob, shared_client: Client, echoes: None
) -> None:
    rows, gate = held_rows(echo_job, 80, step_s=0.01)
    job = lorabatch.submit(**echo_job.options(), client=shared_client)
    assert job.status().headline in ("queued", "starting", "indexing", "planning", "loading engines", "running")
    with pytest.raises(TimeoutError, match="has not ended in 0"):
        job.wait(0)
    with pytest.raises(lorabatch.JobRequestError, match="runs on the cluster already"):
        lorabatch.submit(**echo_job.options(), client=shared_client)
    watcher = Watcher(lambda state: bool(state.rows), gate.touch)
    result = job.result(300, progress=watcher)
    assert watcher.states[-1].phase == "done"
    assert (result.num_rows, result.job_id) == (80, job.job_id)
    echo_job.assert_answered(rows)
    assert job.cluster == echo_job.record.spec.cluster == shared_client.scheduler_info()["address"]
    expected = echo_job.rows()
    frame = job.to_pandas().sort_values("id")
    assert frame["completion"].tolist() == [row["completion"] for row in expected]
    partitions = job.to_dask_dataframe()
    assert partitions.npartitions == result.num_parts
    assert partitions.compute(scheduler="synchronous")["id"].sort_values().tolist() == frame["id"].tolist()
    assert list(job.logs()) == list(log_lines(echo_job.store))
    assert job.cancel() is False
    assert lorabatch.submit(**echo_job.options(), client=shared_client).cluster == ""


def test_rows_are_read_and_a_job_is_awaited_while_it_runs(
    echo_job: EchoJob, shared_client: Client, echoes: None
) -> None:
    rows, gate = held_rows(echo_job, 64, step_s=0.05)
    job = lorabatch.submit(**echo_job.options(rows_per_shard=8), client=shared_client)
    # Ids by whether the job was running when they were read.
    read: dict[bool, list[int]] = {True: [], False: []}

    def collect() -> None:
        for row in job.iter_rows(["id", "completion"]):
            assert row.keys() == {"id", "completion"}
            read[not echo_job.store.is_finished()].append(row["id"])

    async def awaited() -> tuple[lorabatch.JobResult, int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.05)
                beats += 1

        beating = asyncio.create_task(beat())
        collecting = asyncio.create_task(asyncio.to_thread(collect))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job, 0.2)
        gate.touch()
        result = await job
        await collecting
        beating.cancel()
        return result, beats

    result, beats = asyncio.run(awaited())
    assert result == job.result()
    assert beats > 5
    assert read[True]
    assert sorted(read[True] + read[False]) == [row["id"] for row in rows]
    assert sorted(row["completion"] for row in job.iter_rows()) == sorted(row["completion"] for row in echo_job.rows())
    with pytest.raises(lorabatch.JobRequestError, match=r"columns=\['compleation'\]: not in the output"):
        next(job.iter_rows(["id", "compleation"]))


def test_rows_of_parts_that_are_made_again_and_of_another_job_are_not_passed_off(
    echo_job: EchoJob, shared_client: Client, echoes: None
) -> None:
    echo_job.write_input(make_rows(16))
    lorabatch.run(**echo_job.options(rows_per_shard=8), client=shared_client, progress=False)
    job = lorabatch.Job(echo_job.output)
    reading = job.iter_rows()
    next(reading)
    part = min(echo_job.output.glob("part-*.parquet"))
    whole = part.read_bytes()
    state = echo_job.store.read_state()
    assert state is not None
    # The job is taken up again, and the part that was read is another one.
    echo_job.store.unmark_success()
    echo_job.store.write_state(replace(state, phase="running", updated_at_s=time.time()))
    pq.write_table(pq.read_table(part).slice(1), part)
    with pytest.raises(lorabatch.JobFailedError, match="1 parts that were read are computed again"):
        list(reading)
    part.write_bytes(whole)
    # Before a run has planned its rows, it may take parts away.
    echo_job.store.write_state(replace(state, phase="planning", updated_at_s=time.time()))
    early = threading.Thread(target=lambda: next(job.iter_rows()), daemon=True)
    early.start()
    early.join(1.5)
    assert early.is_alive()
    echo_job.store.write_state(replace(state, phase="running", updated_at_s=time.time()))
    early.join(30)
    assert not early.is_alive()
    reading = job.iter_rows()
    next(reading)
    options = echo_job.options(rows_per_shard=8, overwrite=True, seed=5)
    lorabatch.run(**options, client=shared_client, progress=False)
    with pytest.raises(lorabatch.JobRequestError, match="another job has taken the place"):
        list(reading)


@pytest.mark.long
def test_a_cancelled_job_raises_so_until_it_is_submitted_again(
    echo_job: EchoJob, shared_client: Client, echoes: None
) -> None:
    rows, gate = held_rows(echo_job, 80, step_s=0.01)
    job = lorabatch.submit(**echo_job.options(), client=shared_client)
    wait_until(lambda: (state := job.status().state) is not None and state.phase in ("loading engines", "running"))
    assert job.cancel() is True
    assert job.wait().headline == "cancelled"
    with pytest.raises(lorabatch.JobCancelledError):
        job.result()
    with pytest.raises(lorabatch.JobCancelledError):
        lorabatch.Job(echo_job.output).to_pandas()
    gate.touch()
    # Not how the run before has ended, however soon it is asked.
    assert lorabatch.submit(**echo_job.options(), client=shared_client).result(300).num_rows == 80
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_a_job_that_fails_raises_from_its_handle_what_run_raises(
    echo_job: EchoJob, shared_client: Client, echoes: None, capfd: pytest.CaptureFixture[str]
) -> None:
    # More than are checked before the coordinator's task begins.
    rows = make_rows(5000, names=("rank8", "missing"))
    echo_job.write_input(rows)
    job = lorabatch.submit(**echo_job.options(), client=shared_client)
    with pytest.raises(lorabatch.ErrorBudgetError) as raised:
        job.result(300)
    assert isinstance(job.status().error, lorabatch.ErrorBudgetError)
    capfd.readouterr()
    with pytest.raises(lorabatch.ErrorBudgetError) as again:
        lorabatch.run(**echo_job.options(), client=shared_client, progress=False)
    assert str(raised.value) == str(again.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
@DASK_FRAMES
def test_a_job_without_rows_has_an_empty_table(echo_job: EchoJob, shared_client: Client, echoes: None) -> None:
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("note", pa.string())])
    pq.write_table(schema.empty_table(), echo_job.folder / "input.parquet")
    options = echo_job.options() | {"adapters": None}
    result = lorabatch.run(**options, client=shared_client, progress=False)
    assert result.num_rows == 0
    table = lorabatch.Job(echo_job.output).to_arrow()
    assert table.num_rows == 0
    one = pa.table([[1], ["quick"], ["n"]], schema=schema)
    pq.write_table(one, echo_job.folder / "input.parquet")
    lorabatch.run(**options | {"output": echo_job.folder / "one"}, client=shared_client, progress=False)
    assert table.schema.equals(lorabatch.Job(echo_job.folder / "one").to_arrow().schema)
    assert len(lorabatch.Job(echo_job.output).to_dask_dataframe()) == 0


@pytest.mark.long
@DASK_FRAMES
def test_answers_in_object_storage_are_read_with_its_options(
    echo_job: EchoJob, shared_client: Client, echoes: None, bucket: Any
) -> None:
    echo_job.write_input(make_rows(20))
    options = echo_job.options(output="s3://bucket/answers", storage_options=bucket.options)
    lorabatch.run(**options, client=shared_client, progress=False)
    job = lorabatch.Job("s3://bucket/answers", bucket.options)
    assert sorted(job.to_pandas()["id"]) == list(range(20))
    assert len(job.to_dask_dataframe().compute(scheduler="synchronous")) == 20
    assert job.status().headline == "done"


@pytest.mark.long
def test_a_script_needs_no_guard(echo_job: EchoJob) -> None:
    echo_job.write_input(make_rows(20))
    script = echo_job.folder / "script.py"
    script.write_text(
        "import lorabatch\nfrom lorabatch.pipeline import run\n"
        f"run.run.__kwdefaults__['engine_factory'] = {ECHO_FACTORY!r}\n"
        f"print('rows:', lorabatch.run({str(echo_job.write_job_file())!r}, workers=1).num_rows)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "rows: 20\n"), done.stderr
    # Progress, and nothing else.
    assert "done  20 of 20 rows answered" in done.stderr
    assert "Traceback" not in done.stderr
