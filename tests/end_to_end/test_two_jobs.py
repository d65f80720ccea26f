"""Two different jobs that begin at the same moment on one output: one of them goes on, whatever the store."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.stores import Store, command, started

pytestmark = pytest.mark.long
NUM_WRITERS, NUM_NAMES = 4, 30
# Writers wait for the same moment by the clock, then each wants all of the names.
CREATE = """
import json, sys, time
from lorabatch.jobs.storage.location import Location
url, options, start_s, names, number = sys.argv[1:]
place = Location(url, json.loads(options))
place.exists("x")
time.sleep(max(0.0, float(start_s) - time.time()))
data = number.encode() * 100_000
print(json.dumps([i for i in range(int(names)) if place.create(f"claim-{i}", data)]))
"""


@pytest.fixture(params=["local", "s3", "azure", "sftp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with started(request.param, tmp_path) as store:
        yield store


def test_one_of_two_jobs_is_refused_and_nothing_of_it_is_in_the_output(
    store: Store, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    jobs = [small_job(64, rows_per_shard=8)]
    jobs = [jobs[0] | {"max_tokens": tokens, "output": tmp_path / f"alone-{tokens}"} for tokens in (3, 5)]
    for job in jobs:
        subprocess.run(command(store.echo_program, job), check=True, capture_output=True, timeout=240)
    there = {"output": f"{store.root}/output"}
    words = [command(store.echo_program, job | there, store.options) for job in jobs]
    running = [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in words]
    said = [process.communicate(timeout=400) for process in running]
    codes = [process.returncode for process in running]
    assert sorted(codes) == [0, 2], said
    refusal = said[codes.index(2)][1]
    assert "holds another job" in refusal, refusal
    assert "Traceback" not in refusal
    alone = digest(jobs[codes.index(0)]["output"])
    assert digest(store.fetched("output", tmp_path / "fetched")) == alone


def test_of_several_writers_that_create_one_file_one_is_told_that_it_did(store: Store, tmp_path: Path) -> None:
    given = [f"{store.root}/claims", json.dumps(store.options), str(time.time() + 6), str(NUM_NAMES)]
    writers = [
        subprocess.Popen([store.python, "-c", CREATE, *given, str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(NUM_WRITERS)
    ]
    claimed = [json.loads(writer.communicate(timeout=240)[0]) for writer in writers]
    assert sorted(name for names in claimed for name in names) == list(range(NUM_NAMES))
    claims = store.fetched("claims", tmp_path / "fetched")
    for number, names in enumerate(claimed):
        for name in names:
            assert (claims / f"claim-{name}").read_bytes() == str(number).encode() * 100_000
