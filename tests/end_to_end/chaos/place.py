"""Where a trial's output is, and its trouble: parts that change, a disk that is full, a store that fails."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lorabatch.jobs.contents import part_name
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.store import JobStore
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server
from lorabatch.tests.end_to_end.chaos.scenario import Signal, StoreKind
from lorabatch.tests.end_to_end.faulty_proxy import Fault, FaultyProxy, listening_socket
from lorabatch.tests.end_to_end.hosts.network import Network
from lorabatch.tests.end_to_end.hosts.switch import inside

_BALLAST = ".ballast"
_DISK_BYTES = 64 << 20
# Beyond the headers of a request, and less than any file of a job.
_UPLOADS_CUT = Fault("cut", ("PUT",), after_bytes=700)


class LocalPlace:
    """A folder; `disk`: of a small file system of its own, which can be filled."""

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        self._output = folder
        self._disk = disk
        self.store = JobStore(str(folder))

    def options(self) -> dict[str, Any]:
        """Of the job, to write there."""
        return {"output": str(self._output)}

    def keep_adapters(self, folder: Path) -> Path | str:
        """Where a job finds the adapters of a folder."""
        return folder

    def fetched(self) -> Path:
        """The output as a local folder."""
        return self._output

    def strike(self, _signal: str) -> bool:
        """Fill the disk to its last byte; False where that is not possible."""
        if self._disk is None:
            return False
        with suppress(OSError), (self._disk / _BALLAST).open("ab", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))
        with suppress(OSError), (self._disk / _BALLAST).open("ab", buffering=0) as ballast:
            while True:
                ballast.write(b"0")
        return True

    def relieve(self) -> None:
        """Make room again."""
        if self._disk is not None:
            (self._disk / _BALLAST).unlink(missing_ok=True)

    @property
    def is_in_trouble(self) -> bool:
        """Whether it is full."""
        return self._disk is not None and (self._disk / _BALLAST).exists()


class S3Place:
    """A bucket of a server that fails for a while, or that a proxy fails. `address`: of the proxy."""

    def __init__(self, bucket: Bucket, folder: Path, proxy: FaultyProxy, address: str) -> None:
        self._bucket = bucket
        self._folder = folder
        self._proxy = proxy
        self._options = bucket.options_at(address, proxy.port)
        self._fault = bucket.hold.with_suffix(".fault")
        self._are_uploads_cut = False
        self.store = JobStore("s3://bucket/output", bucket.own_options)

    def options(self) -> dict[str, Any]:
        """Of the job, to write there."""
        return {"output": "s3://bucket/output", "storage_options": json.dumps(self._options)}

    def keep_adapters(self, folder: Path) -> Path | str:
        """A copy in the bucket, which workers fetch."""
        return self._bucket.put(folder, "adapters")

    def fetched(self) -> Path:
        """The output as a local folder."""
        self._bucket.fs.invalidate_cache()
        self._bucket.fs.get("bucket/output/", str(self._folder), recursive=True)
        return self._folder

    def strike(self, signal: str) -> bool:
        """Begin a fault."""
        if signal == "PUTS":
            self._proxy.fail(_UPLOADS_CUT)
            self._are_uploads_cut = True
            return True
        whole = self._fault.with_suffix(".new")
        whole.write_text(signal)
        whole.rename(self._fault)
        return True

    def relieve(self) -> None:
        """End it."""
        self._fault.unlink(missing_ok=True)
        self._proxy.fail(None)
        self._are_uploads_cut = False

    @property
    def is_in_trouble(self) -> bool:
        """Whether there is a fault now."""
        return self._are_uploads_cut or self._fault.exists()


Place = LocalPlace | S3Place


def strike_part(store: JobStore, signal: Signal, pick: int) -> bool:
    """Change a committed part; False where none is there, or no other one to copy over it."""
    parts = sorted(store.committed_parts())
    if len(parts) < 2:
        return False
    number, other = parts[pick % len(parts)], parts[(pick + 1) % len(parts)]
    # A disk may be full, a store fail, or the job have removed it: then there is half of what was meant, or nothing.
    with suppress(StorageError, OSError):
        if signal == "DELETED":
            store.location.remove([part_name(number)])
        else:
            data = store.location.read(part_name(other if signal == "REPLACED" else number))
            size = len(data) if signal == "REPLACED" else len(data) * (pick // 2) // 4
            if store.location.is_local:
                store.location.local_path(part_name(number)).write_bytes(data[:size])
            else:
                store.location.write(part_name(number), data[:size])
    return True


@contextmanager
def make_place(kind: StoreKind, folder: Path, net: Network | None) -> Iterator[Place]:
    """An empty one in a trial's folder."""
    output = folder / "output"
    if kind == "s3":
        address = "127.0.0.1" if net is None else net.address("store")
        with s3_server(folder) as bucket:
            bucket.fs.mkdir("bucket")
            with nullcontext() if net is None else inside(net.namespace("store")):
                listener = listening_socket(address)
            proxy = FaultyProxy(bucket.port, listener)
            try:
                yield S3Place(bucket, output, proxy, address)
            finally:
                proxy.close()
    elif kind == "small disk" and can_mount():
        disk = folder / "disk"
        disk.mkdir()
        with mounted(disk):
            yield LocalPlace(disk / "output", disk)
    else:
        yield LocalPlace(output)


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A small file system there, gone at the end whoever still uses it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "trial", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@cache
def can_mount() -> bool:
    """Whether this process may mount file systems."""
    if os.geteuid() != 0:
        return False
    with TemporaryDirectory() as folder:
        words = ["mount", "-t", "tmpfs", "trial", folder]
        is_possible = subprocess.run(words, capture_output=True, check=False).returncode == 0
        if is_possible:
            subprocess.run(["umount", folder], check=True)
    return is_possible
