"""Parts that are lost, cut, exchanged or foreign: a job counts as done only with the parts that it would write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from echo_job import EchoJob, Watcher, make_rows

from lorabatch.jobs.status.job_status import read_status

ROWS = make_rows(96)
Change = Callable[[Path], object]


def part(output: Path, number: int) -> Path:
    return output / f"part-{number:05d}.parquet"


def copy_one(output: Path) -> None:
    shutil.copy(part(output, 0), part(output, 1))


def cut_one(output: Path) -> None:
    os.truncate(part(output, 1), 500)


def empty_one(output: Path) -> None:
    os.truncate(part(output, 1), 0)


def remove_one(output: Path) -> None:
    part(output, 1).unlink()


def add_one(output: Path) -> None:
    shutil.copy(part(output, 0), part(output, 77))


@pytest.mark.long
def test_parts_that_change_while_the_job_runs_are_computed_again(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(ROWS)
    echo_job.set_engine(step_s=0.02)
    changes = iter((copy_one, cut_one))

    def change() -> None:
        next(changes)(echo_job.output)

    watcher = Watcher(lambda state: {*echo_job.parts()} >= {"part-00000.parquet", "part-00001.parquet"}, change)
    result = echo_job.run(client=shared_client, progress=watcher)
    assert next(changes) is cut_one, "nothing was changed"
    echo_job.assert_answered(ROWS)
    assert (result.num_rows, result.num_parts) == (96, len(echo_job.parts()))


@pytest.mark.long
def test_a_job_that_was_done_computes_again_what_has_become_of_its_parts(
    echo_job: EchoJob, shared_client: Client
) -> None:
    echo_job.write_input(ROWS)
    echo_job.run(client=shared_client)
    changes: list[tuple[Change, str]] = [
        (remove_one, "part-00001.parquet is not there"),
        (cut_one, "part-00001.parquet has 500 bytes, not"),
        (empty_one, "part-00001.parquet has 0 bytes, not"),
        (add_one, "part-00077.parquet belongs to no shard of the job"),
    ]
    for change, said in changes:
        before = echo_job.parts()
        change(echo_job.output)
        status = read_status(echo_job.store)
        assert (status.is_finished, status.outcome, status.exit_code) == (False, "failed", 1)
        assert said in status.message
        assert status.next_step == f"lorabatch resume {echo_job.output}"
        echo_job.run(client=shared_client)
        echo_job.assert_answered(ROWS)
        assert read_status(echo_job.store).outcome == "done"
        after = echo_job.parts()
        assert after.keys() == before.keys()
        changed = {name for name in after if after[name] != before[name]}
        assert changed <= {"part-00001.parquet"}, "other parts were computed again"


@pytest.mark.long
def test_a_job_is_done_only_with_its_own_parts(echo_job: EchoJob, shared_client: Client) -> None:
    echo_job.write_input(ROWS)
    echo_job.run(client=shared_client)
    ours = echo_job.output / "_lorabatch"
    # As `_SUCCESS` of another folder beside what a run has left.
    for change in (copy_one, cut_one, empty_one, remove_one, add_one):
        (echo_job.output / "_SUCCESS").unlink()
        (ours / "parts.json").unlink()
        change(echo_job.output)
        echo_job.run(client=shared_client)
        echo_job.assert_answered(ROWS)
    (ours / "summary.json").unlink()
    remove_one(echo_job.output)
    echo_job.run(client=shared_client)
    echo_job.assert_answered(ROWS)
    before = echo_job.parts()
    echo_job.run(client=shared_client, verify=True)
    assert echo_job.parts() == before
