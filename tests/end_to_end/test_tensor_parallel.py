"""Jobs whose engines are several processes: the real command, and members that are killed or stopped in mid-job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_job import Watcher, processes_of, wait_until
from peft_oracle import make_engine, register_all

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.request import ExportedRow, Request, SamplingParams
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.record import JobState
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.messages import EngineSettings, WorkerReport
from lorabatch.pipeline.run import run
from lorabatch.pipeline.supervisor.supervisor import EngineSupervisor

NAMES = (None, "rank1", "rank8", "rank20", "rank64")


def write_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    rows = [
        {"id": f"{i}", "adapter": NAMES[i % 5], "prompt_token_ids": [3 + (i * 7 + j) % 300 for j in range(4 + i % 9)]}
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "input.parquet", row_group_size=32)
    return rows


def options(folder: Path, model: Path, adapters: dict[str, Path], output: str, **more: Any) -> dict[str, Any]:
    given = {"model": str(model), "adapters": str(next(iter(adapters.values())).parent)}
    given |= {"input": str(folder / "input.parquet"), "output": str(folder / output)}
    return given | {"workers": 1, "max_tokens": 12, "ignore_eos": True, "pool_bytes": 4 << 20, "batch_rows": 8} | more


def expected_of(
    model: Path, adapters: dict[str, Path], rows: list[dict[str, Any]], max_tokens: int
) -> dict[str, tuple[str, str | None, None]]:
    """What an engine of one process answers."""
    engine = make_engine(model)
    ids = register_all(engine, adapters)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    asked = [Request(r["id"], tuple(r["prompt_token_ids"]), ids.get(r["adapter"] or ""), sampling) for r in rows]
    texts = {result.request_id: result.text for result in engine.run(asked)}
    return {row.request_id: (texts[row.request_id], row.adapter_id, None) for row in asked}


def answers_of(output: Path) -> dict[str, tuple[Any, ...]]:
    rows = pa.concat_tables(pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))).to_pylist()
    answers = {row["id"]: (row["completion"], row["adapter_sha256"], row["error"]) for row in rows}
    assert len(answers) == len(rows), "a row is there twice"
    return answers


@pytest.mark.long
def test_the_command_answers_with_groups_as_with_engines_of_one_process(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path, 40)
    command = [sys.executable, "-m", "lorabatch", "run", "--tensor-parallel", "2"]
    for name, value in options(tmp_path, tiny_llama, tiny_adapters, "two").items():
        command += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "an engine is 2 processes that share the model" in done.stdout + done.stderr
    assert answers_of(tmp_path / "two") == expected_of(tiny_llama, tiny_adapters, rows, 12)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_lost_in_mid_job_costs_no_row(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    rows = write_rows(tmp_path, 480)
    before: list[int] = []

    def strike() -> None:
        before.extend(process.pid for process in processes_of(os.getpid(), "member"))
        os.kill(before[0], number)

    def half_done(state: JobState) -> bool:
        return state.phase == "running" and 0 < state.rows_done < state.rows

    watcher = Watcher(half_done, strike)
    asked = options(tmp_path, tiny_llama, tiny_adapters, "two", max_tokens=40, tensor_parallel=2, rows_per_shard=16)
    run(JobSpec(**asked), progress=watcher)
    assert watcher.has_acted
    assert before
    assert answers_of(tmp_path / "two") == expected_of(tiny_llama, tiny_adapters, rows, 40)
    assert processes_of(os.getpid(), "member") == []
    logs = "".join(path.read_text() for path in (tmp_path / "two/_lorabatch/logs").glob("*.log"))
    if number == signal.SIGKILL:
        assert "member 1 of 2 of the tensor-parallel group ended: it was killed by signal 9" in logs
    else:
        assert "it sent no heartbeat for 15 s" in logs


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_group_on_devices_of_its_own_is_replaced_when_a_member_is_lost(
    make_model: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    """In Triton's interpreter, where members add up by gloo: the leader waits for the sum of one that is gone, or that
    hangs."""
    base = make_model(tmp_path / "base", hidden_size=32, intermediate_size=40, num_hidden_layers=1)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    rows = [Request(f"{i}", (5 + i, 6, 7), None, sampling) for i in range(6)]
    expected = {result.request_id: result.text for result in make_engine(base).run(rows)}
    config = EngineConfig(
        tensor_parallel=2, num_threads=2, device="cpu", kernels="triton", mode="unmerged", max_batch_rows=2,
        max_step_tokens=16, pool_bytes=1 << 20,
    )  # fmt: skip
    supervisor = EngineSupervisor(
        EngineSettings(str(base), config), lambda: base, tmp_path, "tcp://worker", silence_s=4.0
    )
    reports: list[WorkerReport] = []
    try:
        shard = supervisor.join("run", reports.append).open(0, map(ExportedRow, rows), [])
        wait_until(lambda: any(report.running_rows > 0 for report in reports))
        (member,) = processes_of(os.getpid(), "member")
        os.kill(member.pid, number)
        assert shard.num_unfinished
        wait_until(lambda: not shard.num_unfinished)
        found = [row.result for row in shard.take(timeout_s=1)]
        assert {result.request_id: result.text for result in found} == expected
        assert len(found) == len(rows), "a row is there twice"
        words = "ended: it was killed by signal 9" if number == signal.SIGKILL else "it sent no heartbeat for 4 s"
        assert any(words in str(report.error) for report in reports)
        assert not psutil.pid_exists(member.pid)
    finally:
        supervisor.close(10)


def test_models_that_are_not_split_are_refused_before_any_work(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    write_rows(tmp_path, 2)
    with pytest.raises(JobRequestError, match="tensor_parallel=8: the model has 4 query heads"):
        run(JobSpec(**options(tmp_path, tiny_llama, tiny_adapters, "none", tensor_parallel=8)))
