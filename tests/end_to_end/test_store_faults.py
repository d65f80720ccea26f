"""A store that refuses, throttles or lists late in mid-job: the job goes on, or ends with a sentence and resumes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_job import ECHO_FOLDER

from lorabatch.tests.end_to_end.bucket import Bucket
from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.stores import command

pytestmark = pytest.mark.long
ECHO = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]


@pytest.fixture
def words(bucket: Bucket, small_job: Callable[..., dict[str, Any]], tmp_path: Path) -> list[str]:
    """The command of a job on the bucket; the same job has run on local disk."""
    job = small_job(96, max_tokens=24, rows_per_shard=8, batch_rows=4)
    job["model"] = shutil.copytree(job["model"], tmp_path / "model")
    (tmp_path / "model" / "echo.json").write_text(json.dumps({"step_s": 0.05}))
    subprocess.run(command(ECHO, job), check=True, capture_output=True, timeout=240)
    remote = {name: bucket.put(Path(job[name]), name) for name in ("model", "adapters", "input")}
    return command(ECHO, job | remote | {"output": "s3://bucket/output"}, bucket.options)


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
