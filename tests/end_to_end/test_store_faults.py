"""A store that refuses, throttles or lists late in mid-job: the job goes on, or ends with a sentence and resumes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from echo_job import ECHO_FOLDER

from lorabatch.tests.end_to_end.bucket import Bucket
from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from lorabatch.tests.end_to_end.stores import command

pytestmark = pytest.mark.long
ECHO = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the job's output on local disk; it is there once a test has run the job."""
    return tmp_path_factory.mktemp("local") / "output"


@pytest.fixture
def words(bucket: Bucket, local: Path, small_job: Callable[..., dict[str, Any]], tmp_path: Path) -> list[str]:
    """The command of a job on the bucket; the same job has run on local disk."""
    return words_of(bucket, local, small_job, tmp_path, bucket.options)


def words_of(
    bucket: Bucket, local: Path, small_job: Callable[..., dict[str, Any]], tmp_path: Path, options: dict[str, Any]
) -> list[str]:
    job = small_job(96, max_tokens=24, rows_per_shard=8, batch_rows=4)
    job["model"] = shutil.copytree(job["model"], tmp_path / "model")
    (tmp_path / "model" / "echo.json").write_text(json.dumps({"step_s": 0.05}))
    if not local.exists():
        subprocess.run(command(ECHO, job | {"output": local}), check=True, capture_output=True, timeout=240)
    shutil.copytree(local, tmp_path / "local-output")
    remote = {name: bucket.put(Path(job[name]), name) for name in ("model", "adapters", "input")}
    return command(ECHO, job | remote | {"output": "s3://bucket/output"}, options)


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultyProxy]:
    """A network in front of the bucket that can have faults."""
    with faulty_proxy(bucket.port) as proxy:
        yield proxy


@pytest.fixture
def words_by_proxy(
    bucket: Bucket, proxy: FaultyProxy, local: Path, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> list[str]:
    """The command of the job whose processes all reach the bucket by the proxy."""
    options = bucket.options | {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}}
    return words_of(bucket, local, small_job, tmp_path, options)


def assert_right(bucket: Bucket, tmp_path: Path) -> None:
    bucket.fs.invalidate_cache()
    bucket.fs.get("bucket/output/", str(tmp_path / "fetched"), recursive=True)
    assert digest(tmp_path / "fetched") == digest(tmp_path / "local-output")
    assert "_SUCCESS" in bucket.names("output")


def assert_tidy(bucket: Bucket) -> None:
    assert not {"rows", "wip", "tmp"} & bucket.names("output/_lorabatch")


def said_when_faults_began(
    words: list[str], bucket: Bucket, tmp_path: Path, *faults: dict[str, Any]
) -> tuple[int, str]:
    """Run the command; the faults begin when its first shard is done. Its exit code and what it said."""
    said = tmp_path / "said"
    with said.open("w") as file:
        client = subprocess.Popen(words, stdout=file, stderr=file)
    pause, give_up_s = threading.Event(), time.monotonic() + 300
    while not re.search(r" [1-9]\d*/\d+ shards", said.read_text()):
        assert client.poll() is None, said.read_text()
        assert time.monotonic() < give_up_s, said.read_text()
        pause.wait(0.05)
    bucket.fail(*faults)
    return client.wait(400), said.read_text()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("403 PUT /bucket/output/", "access was refused"), ("500 HEAD /bucket/output/", "Internal Server Error")],
    ids=["denied", "broken"],
)
def test_a_store_that_refuses_ends_the_job_with_a_sentence_and_it_resumes(
    bucket: Bucket, words: list[str], tmp_path: Path, fault: str, reason: str
) -> None:
    code, said = said_when_faults_began(words, bucket, tmp_path, fault)
    assert code == 1, said
    assert reason in said, said
    assert "Traceback" not in said, said
    bucket.fail()
    again = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 0, again.stderr
    assert_right(bucket, tmp_path)
    assert_tidy(bucket)


@pytest.mark.parametrize(
    "faults",
    [["503 any / 0.2"], ["429 any / 0.2"], ["late"], ["late", "503 any / 0.2"]],
    ids=["503", "429", "late", "both"],
)
def test_a_store_that_throttles_or_lists_late_costs_time_only(
    bucket: Bucket, words: list[str], tmp_path: Path, faults: list[str]
) -> None:
    bucket.fail(*faults)
    done = subprocess.run(words, capture_output=True, text=True, timeout=550, check=False)
    bucket.fail()
    assert done.returncode == 0, done.stderr
    assert_right(bucket, tmp_path)
    assert (
        "This job is done already."
        in subprocess.run(words, capture_output=True, text=True, timeout=240, check=False).stderr
    )


# How long a store may be away before the job ends: the limit of one operation, and what is asked at the end.
MOST_S = 110
# How long a command may say nothing.
MOST_SILENT_S = 60
FAULTS = {
    "uploads_cut": Fault("cut", ("PUT",), after_bytes=700),
    "requests_cut": Fault("cut", after_bytes=0),
    "replies_cut": Fault("cut", after_bytes=30, of_reply=True),
    "all_refused": Fault("status", status="503 Slow Down"),
    "uploads_refused": Fault("status", ("PUT",), status="500 Internal Server Error"),
    "all_throttled": Fault("status", status="429 Too Many Requests"),
    "all_silent": Fault("silent"),
    "uploads_silent": Fault("silent", ("PUT",)),
    "uploads_stalled": Fault("stall", ("PUT",), after_bytes=700),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_store_that_is_away_for_good_ends_the_job_in_time_and_in_words(
    bucket: Bucket, proxy: FaultyProxy, words_by_proxy: list[str], tmp_path: Path, name: str
) -> None:
    began: list[float] = []

    def fail() -> None:
        began.append(time.monotonic())
        proxy.fail(FAULTS[name])

    code, said = lines_when_faults_began(words_by_proxy, fail)
    text, ended_s = "\n".join(line for _, line in said), time.monotonic()
    assert code == 1, text
    assert ended_s - began[0] < MOST_S, text
    moments = [began[0], *(at_s for at_s, _ in said if at_s > began[0]), ended_s]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert max(gaps) < MOST_SILENT_S, text
    words = [line for at_s, line in said if at_s > began[0] and "storage: " in line]
    assert any("s3://bucket/output" in line and "tried again" in line for line in words) or "silent" in name, text
    assert "Traceback" not in text, text
    assert not [line for at_s, line in said if at_s > began[0] + 45 and " left" in line], text
    proxy.fail(None)
    again = subprocess.run(words_by_proxy, capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 0, again.stderr
    assert_right(bucket, tmp_path)
    assert_tidy(bucket)


@pytest.mark.parametrize("pause_s", [0.1, 0.4])
def test_a_store_that_is_very_slow_costs_time_only(
    bucket: Bucket, proxy: FaultyProxy, words_by_proxy: list[str], tmp_path: Path, pause_s: float
) -> None:
    fault = Fault("drip", of_reply=True, piece_bytes=400, pause_s=pause_s)
    code, said = lines_when_faults_began(words_by_proxy, lambda: proxy.fail(fault))
    assert code == 0, said
    assert_right(bucket, tmp_path)


def lines_when_faults_began(words: list[str], begin: Callable[[], None]) -> tuple[int, list[tuple[float, str]]]:
    """Run the command; the faults begin when its first shard is done. Its exit code, and each line with its moment."""
    client = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert client.stdout is not None
    said: list[tuple[float, str]] = []
    has_begun = False
    with client.stdout:
        for line in client.stdout:
            said.append((time.monotonic(), line.rstrip()))
            print(f"{said[-1][0] - said[0][0]:6.1f} {line}", end="", flush=True)  # shown where the test fails
            if not has_begun and re.search(r" [1-9]\d*/\d+ shards", line):
                has_begun = True
                begin()
    assert has_begun, said
    return client.wait(60), said
