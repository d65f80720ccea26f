"""Stores that a test starts for itself, each with a whole job's folders: a bucket of moto, blobs of Azurite, SFTP.

`make test-all` installs the servers and what fsspec needs to reach them, apart from the environment of the tests.
`LORABATCH_TOOLS` names another folder for them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from echo_job import ECHO_FOLDER

from lorabatch.tests.end_to_end.bucket import s3_server
from lorabatch.tests.end_to_end.sftp_server import SECRET, USER

TOOLS = Path(os.environ.get("LORABATCH_TOOLS", Path(sys.prefix) / "tools"))
PYTHON = TOOLS / "stores" / "bin" / "python"
AZURITE = TOOLS / "azurite" / "node_modules" / ".bin" / "azurite-blob"
SERVER = Path(__file__).with_name("sftp_server.py")
COPY = """
import fsspec, json, sys
protocol, options, way, here, there = sys.argv[1:]
fs = fsspec.filesystem(protocol, **json.loads(options))
if not fs.exists("box"):
    fs.mkdir("box")
getattr(fs, way)(*((here, there) if way == "put" else (there, here)), recursive=True)
"""


@dataclass(frozen=True)
class Store:
    """`root`: URL below which everything lies. `folder`: where the server keeps it as files, if it does. `python`:
    that can reach it.
    """

    root: str
    options: dict[str, Any]
    folder: Path | None = None
    python: str = str(PYTHON)

    @property
    def echo_program(self) -> list[str]:
        """The command line, with echo engines."""
        return [self.python, str(ECHO_FOLDER / "echo_cli.py")]

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
        protocol = self.root.split("://")[0]
        given = [protocol, json.dumps(self.options), *words]
        subprocess.run([self.python, "-c", COPY, *given], check=True, timeout=300)


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


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Store]:
    """An empty store of this kind: local, s3, azure or sftp. `folder`: where its server may keep things."""
    served_folder = folder / "served"
    served_folder.mkdir()
    if kind == "local":
        yield Store(str(served_folder), {}, served_folder, sys.executable)
    elif kind == "s3":
        with s3_server(folder) as bucket:
            bucket.fs.mkdir("box")
            yield Store("s3://box/data", bucket.options, None, sys.executable)
    elif kind == "azure":
        key = base64.b64encode(SECRET.encode().ljust(32)).decode()
        words = [AZURITE, "--blobPort", "0", "--location", served_folder, "--skipApiVersionCheck", "--disableTelemetry"]
        with served(words, AZURITE_ACCOUNTS=f"tenant:{key}") as port:
            endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/tenant"
            account = f"DefaultEndpointsProtocol=http;AccountName=tenant;AccountKey={key};{endpoint}"
            store = Store("abfs://box/data", {"connection_string": account})
            (folder / "empty").mkdir()
            store.put(folder / "empty", "empty")  # makes the container
            yield store
    else:
        with served([PYTHON, SERVER, served_folder]) as port:
            yield Store(f"sftp://127.0.0.1:{port}", {"username": USER, "password": SECRET}, served_folder)


def command(program: list[str], options: dict[str, Any], storage: dict[str, Any] | None = None) -> list[str]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [*program, "run", *words, *([f"--storage-options={json.dumps(storage)}"] if storage else [])]
