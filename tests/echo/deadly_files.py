"""A filesystem whose files kill Dask workers that read them: `deadly:///PATH`, as `file:///PATH` elsewhere.

Workers load it as a Dask preload. In other processes nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import fsspec
from distributed import Worker
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

PROTOCOL = "deadly"
#: In the names of files that kill.
MARK = "killer"


class DeadlyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Reads local files."""

    protocol = PROTOCOL
    root_marker = "/"
    is_in_worker = False

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return LocalFileSystem().ls(self._strip_protocol(path), detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        return LocalFileSystem().info(self._strip_protocol(path), **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.is_in_worker and MARK in os.path.basename(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return open(path, mode)


fsspec.register_implementation(PROTOCOL, DeadlyFileSystem, clobber=True)


def dask_setup(worker: Worker) -> None:
    """Called by Dask in each worker's process."""
    DeadlyFileSystem.is_in_worker = True
