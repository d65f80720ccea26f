"""The whole job on stores other than S3: blobs of Azure, as Azurite serves them, and SFTP.

`make test-all` installs the servers and what fsspec needs to reach them, apart from the environment of the tests.
`LORABATCH_TOOLS` names another folder for them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.tests.end_to_end.chaos.sorted_output import digest
from lorabatch.tests.end_to_end.sftp_server import SECRET, USER

pytestmark = pytest.mark.long
TOOLS = Path(os.environ.get("LORABATCH_TOOLS", Path(sys.prefix) / "tools"))
PYTHON = TOOLS / "stores" / "bin" / "python"
AZURITE = TOOLS / "azurite" / "node_modules" / ".bin" / "azurite-blob"
SERVER = Path(__file__).with_name("sftp_server.py")
COPY = """
import fsspec, json, sys
options, way, here, there = sys.argv[1:]
fs = fsspec.filesystem("abfs", **json.loads(options))
fs.mkdir("box", exist_ok=True)
getattr(fs, way)(*((here, there) if way == "put" else (there, here)), recursive=True)
"""


@dataclass(frozen=True)
class Store:
    """`root`: URL below which everything lies. `folder`: where the server keeps it as files, if it does."""

    root: str
    options: dict[str, Any]
    folder: Path | None = None

    def put(self, source: Path, name: str) -> str:
        if self.folder is not None:
            shutil.copytree(source, self.folder / name)
        else:
            self._copy("put", f"{source}/", f"{self._path}/{name}/")
        return f"{self.root}/{name}"

    def fetched(self, name: str, into: Path) -> Path:
        shutil.rmtree(into, ignore_errors=True)
        if self.folder is not None:
            shutil.copytree(self.folder / name, into)
        else:
            self._copy("get", f"{into}/", f"{self._path}/{name}/")
        return into

    @property
    def _path(self) -> str:
        return self.root.split("://")[1]

    def _copy(self, *words: str) -> None:
        subprocess.run([PYTHON, "-c", COPY, json.dumps(self.options), *words], check=True, timeout=300)


@contextmanager
def served(words: list[str | Path], **environment: str) -> Iterator[int]:
    """A server's process; the port that it prints."""
    if not Path(words[0]).exists():
        pytest.skip(f"{words[0]} is not there; `make test-all` installs it")
    server = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    )
    assert server.stdout is not None
    try:
        lines = (re.search(r"(?:^|127\.0\.0\.1:)([1-9]\d*)$", line.strip()) for line in server.stdout)
        yield next(int(found[1]) for found in lines if found)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture(params=["azure", "sftp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / "served"
    folder.mkdir()
    if request.param == "azure":
        key = base64.b64encode(SECRET.encode().ljust(32)).decode()
        words = [AZURITE, "--blobPort", "0", "--location", folder, "--skipApiVersionCheck", "--disableTelemetry"]
        with served(words, AZURITE_ACCOUNTS=f"tenant:{key}") as port:
            endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/tenant"
            account = f"DefaultEndpointsProtocol=http;AccountName=tenant;AccountKey={key};{endpoint}"
            yield Store("abfs://box/data", {"connection_string": account})
        return
    with served([PYTHON, SERVER, folder]) as port:
        yield Store(f"sftp://127.0.0.1:{port}", {"username": USER, "password": SECRET}, folder)


@pytest.fixture
def local_job(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """Options of a job on local disk of many small shards."""
    names = [None, *sorted(tiny_adapters)]
    rows = [{"id": i, "adapter": names[i % len(names)], "prompt": f"the quick brown fox {i}"} for i in range(360)]
    (tmp_path / "input").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input" / "rows.parquet", row_group_size=16)
    return {
        "model": tiny_llama,
        "adapters": next(iter(tiny_adapters.values())).parent,
        "input": tmp_path / "input",
        "output": tmp_path / "local-output",
        "max_tokens": 48,
        "rows_per_shard": 4,
        "batch_rows": 4,
        "mode": "exact",
    }


def command(options: dict[str, Any], storage: dict[str, Any]) -> list[str]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [str(PYTHON), "-m", "lorabatch", "run", *words, f"--storage-options={json.dumps(storage)}"]


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_job_that_is_killed_and_resumed_gives_the_bytes_of_the_job_on_local_disk(
    store: Store, local_job: dict[str, Any], tmp_path: Path
) -> None:
    run(command(local_job, {}))
    remote = {name: store.put(Path(local_job[name]), name) for name in ("model", "adapters", "input")}
    words = command(local_job | remote | {"output": f"{store.root}/output"}, store.options)
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
