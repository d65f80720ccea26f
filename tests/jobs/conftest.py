"""Places to keep a job: a local folder, memory, and a running S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from lorabatch.jobs.record import AdapterRecord, InputFile, InputRecord, JobRecord, ModelRecord
from lorabatch.jobs.spec import JobSpec

Place = tuple[str, dict[str, Any]]
KEY, SECRET = "AKIAEXAMPLEKEY", "very-secret-value"


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Storage options for an S3 server of our own, on loopback."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty folder's URL and its storage options, in each kind of storage."""
    return _place(request, tmp_path)


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.long)])
def read_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A `place` for tests of what is read from a `JobStore`, whose own tests have each kind of storage."""
    return _place(request, tmp_path)


@pytest.fixture(params=["local", "s3"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The same, where several processes may write at once (fsspec's memory is one process's own)."""
    return _place(request, tmp_path)


def _place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return str(tmp_path / "place"), {}
    if request.param == "memory":
        return f"memory://{uuid4().hex}/place", {}
    options = request.getfixturevalue("s3_options")
    bucket = f"bucket-{uuid4().hex}"
    fsspec.filesystem("s3", **options).mkdir(bucket)
    return f"s3://{bucket}/place", options


@pytest.fixture
def record() -> Callable[..., JobRecord]:
    """`record(**changes)`: a small frozen job."""

    def make(**changes: Any) -> JobRecord:
        spec = JobSpec(model="/model", input="/in.parquet", output="/out", adapters="/adapters")
        given: dict[str, Any] = {
            "job_id": "job-1",
            "created_at": "2025-01-01T00:00:00+00:00",
            "versions": {"python": "3.11"},
            "spec": spec.without_secrets(),
            "model": ModelRecord(url="/model", sha256="m" * 64, vocab_size=100, max_context_tokens=64),
            "adapters": (AdapterRecord(name="alpha", url="/a", verdict="exact", sha256="a" * 64, rank=8),),
            "input": InputRecord(
                files=(InputFile(url="/in", name="in", size_bytes=1, footer_sha256="f" * 64, row_group_rows=(3, 4)),),
                roles={"prompt": "prompt"},
                schema_ipc="",
            ),
            "with_logprobs": False,
        }
        return JobRecord(**given | changes)

    return make
