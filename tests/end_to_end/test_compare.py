"""Some rows of a finished job are answered again, in its format and in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from echo_job import ECHO_FACTORY, EchoJob, make_rows
from typer.testing import CliRunner

import lorabatch
from lorabatch.cli import app
from lorabatch.jobs.agreement import Agreement
from lorabatch.jobs.history import known_agreement
from lorabatch.kernels.packed_weight import can_multiply
from lorabatch.pipeline.compare import compare


def compared(job: EchoJob, client: Client, num_rows: int) -> Agreement:
    return compare(job.store, job.record.job_spec(), num_rows, client=client, engine_factory=ECHO_FACTORY)


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [5, pytest.param(1000, marks=pytest.mark.long)])
def test_rows_of_all_parts_are_answered_twice_and_the_job_is_as_before(
    echo_job: EchoJob, shared_client: Client, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", str(echo_job.folder / "history"))
    rows = make_rows(40)
    rows[7]["prompt_token_ids"] = [3] * 5000
    echo_job.write_input(rows)
    echo_job.run(shared_client, base_quantization="int8")
    before, summary = echo_job.rows(), echo_job.store.read_summary()
    found = compared(echo_job, shared_client, num_rows)
    # the row that is too long has no answer
    assert min(num_rows, 39) - 1 <= found.num_rows == found.num_equal <= num_rows
    assert found.leading_share == 1.0
    assert (found.products, found.job_id) == ("int8", echo_job.record.job_id)
    assert (echo_job.rows(), echo_job.store.read_summary()) == (before, summary)
    assert echo_job.store.read_agreement() == known_agreement(echo_job.record.model.sha256, "int8") == found
    assert not (echo_job.output / "_lorabatch" / "compare").exists()


@pytest.mark.long
@pytest.mark.parametrize("samples", [pytest.param("rows", marks=pytest.mark.long), "lists"])
def test_rows_with_several_completions_are_compared_by_one(
    echo_job: EchoJob, shared_client: Client, samples: str
) -> None:
    echo_job.write_input([row | {"count": i % 3 + 1} for i, row in enumerate(make_rows(12))])
    echo_job.run(shared_client, base_quantization="int8", columns={"n": "count"}, samples=samples)
    found = compared(echo_job, shared_client, 100)
    assert found.num_rows == found.num_equal >= 12


@pytest.mark.long
def test_what_cannot_be_compared_is_refused_in_words(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(make_rows(4))
    echo_job.run(shared_client)
    with pytest.raises(lorabatch.JobRequestError, match="computed in float32, which others are compared with"):
        compared(echo_job, shared_client, 5)
    echo_job.write_input([row | {"prompt_token_ids": [3] * 5000} for row in make_rows(4)])
    echo_job.run(shared_client, base_quantization="int8", overwrite=True, max_errors="100%")
    with pytest.raises(lorabatch.JobRequestError, match="no row of this job has an answer"):
        compared(echo_job, shared_client, 5)
    echo_job.store.remove_part(0)
    with pytest.raises(lorabatch.JobRequestError, match="has not finished"):
        compared(echo_job, shared_client, 5)


@pytest.mark.long
@pytest.mark.skipif(not can_multiply("int8"), reason="this processor has no instructions for products in int8")
def test_real_engines_differ_and_the_command_the_plan_and_the_report_say_how(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORABATCH_HISTORY", str(tmp_path / "history"))
    rows = [
        {"id": str(i), "adapter": [None, "rank8", "rank20"][i % 3], "prompt": f"row {i} of some"} for i in range(24)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    adapters = next(iter(tiny_adapters.values())).parent
    options = {"model": str(tiny_llama), "adapters": str(adapters), "input": str(tmp_path / "input.parquet")}
    options |= {"output": str(tmp_path / "output"), "max_tokens": 8, "workers": 1, "base_quantization": "int8"}
    assert "was not compared" in str(lorabatch.plan(**options))
    lorabatch.run(**options, progress=False)
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "output"), "--rows", "12", "--json"])
    assert done.exit_code == 0, done.output
    found = Agreement.from_json(json.loads(done.stdout))
    assert (found.num_rows, found.products) == (12, "int8")
    assert found.logprob_distance is None or found.logprob_distance > 0
    assert str(found) in str(lorabatch.plan(**options)).replace("\n", " ")
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "output"), "--save", str(page)]).exit_code == 0
    assert f"{found.num_equal} of 12 compared" in page.read_text()
