"""A bucket on an S3 server of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

SERVER = Path(__file__).with_name("s3_server.py")
KEY, SECRET = "AKIAEXAMPLEKEY", "very-secret-value"


@dataclass(frozen=True)
class Bucket:
    """How to reach it. `hold`: see `s3_server.py`. `own_options`: for the test itself, which no fault concerns."""

    options: dict[str, Any]
    hold: Path
    own_options: dict[str, Any]

    @property
    def port(self) -> int:
        """Of the server, as other processes than the test reach it."""
        return int(self.options["client_kwargs"]["endpoint_url"].rpartition(":")[2])

    def options_at(self, address: str, port: int | None = None) -> dict[str, Any]:
        """The same for processes that reach the server at another address."""
        return self.options | {"client_kwargs": {"endpoint_url": f"http://{address}:{port or self.port}"}}

    @property
    def fs(self) -> Any:
        return fsspec.filesystem("s3", **self.own_options)

    def fail(self, *faults: str) -> None:
        """Have the server answer with these faults from now on: see `s3_server.py`. None ends them."""
        path = self.hold.with_suffix(".fault")
        path.with_suffix(".new").write_text("\n".join(faults))
        path.with_suffix(".new").replace(path)

    def put(self, folder: Path, name: str) -> str:
        self.fs.put(str(folder), f"bucket/{name}", recursive=True)
        return f"s3://bucket/{name}"

    def names(self, folder: str) -> set[str]:
        self.fs.invalidate_cache()
        return {path.rsplit("/", 1)[-1] for path in self.fs.ls(f"bucket/{folder}")}


@contextmanager
def s3_server(folder: Path, **environment: str) -> Iterator[Bucket]:
    hold = folder / "hold"
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(hold)], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert server.stdout is not None
    try:
        endpoints = [f"http://127.0.0.1:{int(server.stdout.readline())}" for _ in range(2)]
        options, own = ({"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": url}} for url in endpoints)
        yield Bucket(options, hold, own)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
