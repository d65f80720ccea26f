"""The whole job on an S3 server: model, adapters, input and output there, the same answers as on local disk."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_job import ECHO_FOLDER

from lorabatch.tests.end_to_end.bucket import SECRET, Bucket, s3_server
from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.stores import command

pytestmark = pytest.mark.long

LORABATCH = [sys.executable, "-m", "lorabatch"]
LORABATCH_ECHO = [sys.executable, str(ECHO_FOLDER / "echo_cli.py")]
# Refusals must come at once: retrying with pauses, as for a store that is busy, would take far longer.
AT_ONCE_S = 60


@pytest.fixture
def local_job(small_job: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return small_job(40, max_tokens=8, rows_per_shard=8)


def run(words: list[str], timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)


def on_s3(bucket: Bucket, job: dict[str, Any]) -> dict[str, Any]:
    remote = {name: bucket.put(Path(job[name]), name) for name in ("model", "adapters", "input")}
    return job | remote | {"output": "s3://bucket/output"}


def fetched(bucket: Bucket, folder: Path) -> Path:
    bucket.fs.invalidate_cache()
    bucket.fs.get("bucket/output/", str(folder), recursive=True)
    return folder


def test_a_job_on_s3_gives_the_bytes_of_the_job_on_local_disk(
    bucket: Bucket, local_job: dict[str, Any], tmp_path: Path
) -> None:
    here = run(command(LORABATCH, local_job))
    assert here.returncode == 0, here.stderr
    there = run(command(LORABATCH, on_s3(bucket, local_job), bucket.options))
    assert there.returncode == 0, there.stderr
    output = fetched(bucket, tmp_path / "fetched")
    assert digest(output) == digest(local_job["output"])
    assert "_SUCCESS" in bucket.names("output")
    assert not {"rows", "wip", "tmp"} & bucket.names("output/_lorabatch")
    written = b"".join(path.read_bytes() for path in output.rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    assert SECRET not in there.stdout + there.stderr


@pytest.mark.parametrize("reply", ["not-implemented", "invalid-argument"])
def test_a_job_on_a_store_without_conditional_put_gives_the_bytes_of_the_job_on_local_disk(
    reply: str, local_job: dict[str, Any], tmp_path: Path
) -> None:
    assert run(command(LORABATCH_ECHO, local_job)).returncode == 0
    with s3_server(tmp_path, CONDITIONAL_PUT=reply) as bucket:
        bucket.fs.mkdir("bucket")
        words = command(LORABATCH_ECHO, on_s3(bucket, local_job), bucket.options)
        there = run(words)
        assert there.returncode == 0, there.stderr
        assert digest(fetched(bucket, tmp_path / "fetched")) == digest(local_job["output"])
        assert "This job is done already." in run(words).stderr


def test_a_client_killed_between_the_last_part_and_success_resumes_without_computing_a_row(
    bucket: Bucket, local_job: dict[str, Any]
) -> None:
    words = command(LORABATCH_ECHO, on_s3(bucket, local_job), bucket.options)
    bucket.hold.touch()
    client = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen, pause, give_up_s = bucket.hold.with_suffix(".seen"), threading.Event(), time.monotonic() + 300
    while not seen.exists():
        assert client.poll() is None, "the job ended by itself"
        assert time.monotonic() < give_up_s, "_SUCCESS was never written"
        pause.wait(0.05)
    client.kill()
    client.wait()
    bucket.hold.unlink()
    parts = {path: info["LastModified"] for path, info in bucket.fs.find("bucket/output", detail=True).items()}
    parts = {path: when for path, when in parts.items() if "/part-" in path}
    assert len(parts) == 5
    assert "_SUCCESS" not in bucket.names("output")
    again = run(words)
    assert again.returncode == 0, again.stderr
    assert "40 of them were done before this run" in again.stdout
    assert "_SUCCESS" in bucket.names("output")
    bucket.fs.invalidate_cache()
    assert {path: bucket.fs.info(path)["LastModified"] for path in parts} == parts


def test_a_missing_bucket_is_a_wrong_request_reported_at_once(bucket: Bucket, local_job: dict[str, Any]) -> None:
    for name in ("input", "output"):
        wrong = run(command(LORABATCH, local_job | {name: "s3://no-such-bucket/x"}, bucket.options), AT_ONCE_S)
        assert wrong.returncode == 2, wrong.stderr
        assert f"{name}" in wrong.stderr
        assert "s3://no-such-bucket/x" in wrong.stderr
        assert "Check the path or the bucket's name." in wrong.stderr
    assert not Path(local_job["output"]).exists()


def test_refused_credentials_are_a_wrong_request_reported_at_once_for_all_urls(
    local_job: dict[str, Any], tmp_path: Path
) -> None:
    with s3_server(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="0") as bucket:
        remote = {"input": "s3://bucket/input", "output": "s3://bucket/output", "adapters": "s3://bucket/adapters"}
        wrong = run(command(LORABATCH, local_job | remote, bucket.options), AT_ONCE_S)
    assert wrong.returncode == 2, wrong.stderr
    for name, url in remote.items():
        assert name in wrong.stderr
        assert url in wrong.stderr
    assert wrong.stderr.count("access was refused") == 3
    assert wrong.stderr.count("Check the credentials") == 3
    assert SECRET not in wrong.stderr
    assert "Traceback" not in wrong.stderr
