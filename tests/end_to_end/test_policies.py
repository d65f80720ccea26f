"""Every policy on two real workers with real engines: each row once, answered as under the default policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_under_test import own_cluster
from distributed import Client
from echo_job import EchoJob, Watcher, kill_one, make_rows

from lorabatch.benchmarks.simulation.replay import replay_job
from lorabatch.jobs.errors import OutputConflictError
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.run import run
from lorabatch.tests.end_to_end.chaos.sorted_output import digest

NUM_ROWS = 40
# Merged weights are rounded once more than unmerged ones.
LOGPROB_TOLERANCE = 2e-3
CHOICES = (
    ("s-lora", "loraserve"),
    *(
        pytest.param(*choice, marks=pytest.mark.long)
        for choice in (
            ("dlora", "planner"),
            ("planner", "loraserve"),
            ("dlora", "loraserve"),
            ("s-lora", "planner"),
            ("vllm-like", "planner"),
            ("merged-only", "planner"),
            ("peft-like", "planner"),
        )
    ),
)


@pytest.fixture(scope="module")
def options(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A job whose rows ask for the base model and every adapter in turn, with answers of many lengths."""
    folder = tmp_path_factory.mktemp("policies")
    names = [None, *sorted(tiny_adapters)]
    rows = [
        {"id": i, "adapter": names[i * 7 % len(names)], "prompt": f"the quick brown {i}", "max_tokens": 4 + i % 9}
        for i in range(NUM_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "input.parquet", row_group_size=16)
    return {
        "model": str(tiny_llama),
        "adapters": str(next(iter(tiny_adapters.values())).parent),
        "input": str(folder / "input.parquet"),
        "batch_rows": 8,
        "rows_per_shard": 5,
        "engine_threads": 1,
        "logprobs": True,
        "ignore_eos": True,
        "row_settings": "max_tokens",
    }


@pytest.fixture(scope="module")
def expected(options: dict[str, Any], shared_client: Client, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers under the default policy, by id."""
    return answers(options, tmp_path_factory.mktemp("default"), shared_client)


def answers(options: dict[str, Any], folder: Path, client: Client, **more: Any) -> dict[int, dict[str, Any]]:
    """Run the job; its rows by id, each found once."""
    result = run(JobSpec(**options | {"output": str(folder / "output")} | more), client=client)
    assert (result.num_rows, result.num_errors) == (NUM_ROWS, 0)
    parts = [pq.read_table(part).to_pylist() for part in (folder / "output").glob("part-*.parquet")]
    rows = [row for part in parts for row in part]
    found = {row["id"]: row for row in rows}
    assert len(rows) == len(found) == NUM_ROWS
    return found


@pytest.mark.long
@pytest.mark.parametrize(("policy", "placement"), CHOICES)
def test_a_policy_changes_no_answer_and_its_events_replay(
    policy: str, placement: str, options: dict[str, Any], expected: Any, shared_client: Client, tmp_path: Path
) -> None:
    found = answers(options, tmp_path, shared_client, policy=policy, placement=placement)
    for row_id, row in expected.items():
        assert found[row_id]["token_ids"] == row["token_ids"], row_id
        assert found[row_id]["token_logprobs"] == pytest.approx(row["token_logprobs"], abs=LOGPROB_TOLERANCE)
    store = JobStore(str(tmp_path / "output"))
    assert replay_job(store).first_difference is None
    assert store.read_record().spec.policy == policy
    modes = {row["mode"] for row in found.values() if row["adapter"]}
    if policy in ("s-lora", "vllm-like"):
        assert modes == {"unmerged"}
    if policy in ("merged-only", "peft-like"):
        assert modes == {"merged"}
    if policy not in ("planner", "dlora"):
        assert not [line for line in store.read_events() if line["kind"] == "MigrateRows"]


@pytest.mark.long
def test_a_policy_that_never_merges_gives_the_same_bytes_in_mode_exact(
    options: dict[str, Any], shared_client: Client, tmp_path: Path
) -> None:
    hashes = set()
    for policy in ("planner", "s-lora"):
        answers(options, tmp_path / policy, shared_client, policy=policy, mode="exact")
        hashes.add(digest(tmp_path / policy / "output"))
    assert len(hashes) == 1


@pytest.mark.long
def test_a_job_keeps_its_policy(options: dict[str, Any], shared_client: Client, tmp_path: Path) -> None:
    answers(options, tmp_path, shared_client, policy="s-lora")
    with pytest.raises(OutputConflictError, match="policy: was 's-lora', now 'dlora'"):
        run(JobSpec(**options, output=str(tmp_path / "output"), policy="dlora"), client=shared_client)


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("policy", ["s-lora", "dlora"])
def test_rows_that_were_dealt_to_a_worker_that_is_lost_are_answered_by_another(echo_job: EchoJob, policy: str) -> None:
    rows = make_rows(120)
    echo_job.write_input(rows)
    echo_job.set_engine(step_s=0.02)
    watcher = Watcher(lambda state: state.rows_done > 10, lambda: kill_one("worker"))
    with own_cluster() as client:
        result = echo_job.run(client, progress=watcher, policy=policy, max_tokens=40)
    assert watcher.has_acted
    echo_job.assert_answered(rows, max_tokens=40)
    assert (result.num_rows, result.num_errors) == (120, 0)
    assert replay_job(echo_job.store).first_difference is None
