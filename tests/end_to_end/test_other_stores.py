"""The whole job on stores other than S3: blobs of Azure, as Azurite serves them, and SFTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.sftp_server import SECRET
from lorabatch.tests.end_to_end.stores import Store, command, started

pytestmark = pytest.mark.long


@pytest.fixture(params=["azure", "sftp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with started(request.param, tmp_path) as store:
        yield store


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_job_that_is_killed_and_resumed_gives_the_bytes_of_the_job_on_local_disk(
    store: Store, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    program = [store.python, "-m", "lorabatch"]
    local_job = small_job(360, max_tokens=48, rows_per_shard=4, batch_rows=4)
    run(command(program, local_job))
    remote = {name: store.put(Path(local_job[name]), name) for name in ("model", "adapters", "input")}
    words = command(program, local_job | remote | {"output": f"{store.root}/output"}, store.options)
    said = tmp_path / "said"
    with said.open("w") as file:
        client = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    pause, give_up_s = threading.Event(), time.monotonic() + 300
    while not re.search(r" [1-9]\d*/\d+ shards", said.read_text()):
        assert client.poll() is None, said.read_text()
        assert time.monotonic() < give_up_s, said.read_text()
        pause.wait(0.1)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    said.write_text(said.read_text() + run(words))
    output = store.fetched("output", tmp_path / "fetched")
    assert digest(output) == digest(local_job["output"])
    names = {path.relative_to(output).parts for path in output.rglob("*")}
    assert ("_SUCCESS",) in names
    assert not {("_lorabatch", name) for name in ("rows", "wip", "tmp")} & names
    assert "This job is done already." in run(words)
    written = b"".join(path.read_bytes() for path in output.rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    assert SECRET not in said.read_text()
