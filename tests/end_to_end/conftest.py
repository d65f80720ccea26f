"""Jobs on a real local cluster with real worker and engine processes; only the model is replaced by arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from echo_job import ECHO_FOLDER, EchoJob

from lorabatch.pipeline.cluster.background_state import state_file
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server

_CLOSING_S = 60.0


@pytest.fixture
def echo_job(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> EchoJob:
    """A job's folders: a model with real files, real adapters, and engines that answer by arithmetic."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    shutil.copytree(next(iter(tiny_adapters.values())).parent, tmp_path / "adapters")
    job = EchoJob(tmp_path)
    job.set_engine()
    return job


@pytest.fixture
def small_job(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`small_job(num_rows, **options)`: options of a small job of prompts on local disk."""

    def make(num_rows: int, **options: Any) -> dict[str, Any]:
        names = [None, *sorted(tiny_adapters)]
        prompts = [f"the quick brown fox {i}" for i in range(num_rows)]
        rows = [{"id": i, "adapter": names[i % len(names)], "prompt": prompt} for i, prompt in enumerate(prompts)]
        (tmp_path / "input").mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input" / "rows.parquet", row_group_size=16)
        given = {
            "model": tiny_llama,
            "adapters": next(iter(tiny_adapters.values())).parent,
            "input": tmp_path / "input",
            "output": tmp_path / "local-output",
            "mode": "exact",
        }
        return given | options

    return make


@pytest.fixture(scope="session", autouse=True)
def _engines_find_echo() -> Iterator[None]:
    """Workers and engine processes started by these tests can import the echo engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ECHO_FOLDER), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def shared_client(_engines_find_echo: None) -> Iterator[Client]:
    """Two workers for all jobs that leave them as they were."""
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1")
    try:
        with Client(cluster, set_as_default=False) as client:
            yield client
    finally:
        # Dask of January 2026 may wait for ever
        with suppress(TimeoutError):
            cluster.close(timeout=_CLOSING_S)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    """An empty bucket."""
    with s3_server(tmp_path) as bucket:
        bucket.fs.mkdir("bucket")
        yield bucket


@pytest.fixture
def background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state file of a background cluster that this test alone uses, and that ends with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = state_file()
    yield path
    if path.exists():
        process = psutil.Process(json.loads(path.read_text())["pid"])
        below = process.children(recursive=True)
        process.send_signal(signal.SIGKILL)
        psutil.wait_procs([process, *below], timeout=300)
