"""`BackgroundCluster`: the file by which commands of this user find the background cluster of this machine.

The file holds the cluster's key. Only its owner may read it, and a file that another user has put in its place is not
read.
"""

from __future__ import annotations

import json
import os
import platform
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from distributed.security import Security

from ...system.local_cache import default_cache_root, make_private
from .security import security_with


@dataclass(frozen=True, slots=True)
class BackgroundCluster:
    """A background cluster, as its state file describes it: its addresses, its process and its key."""

    #: Address of the Dask scheduler.
    address: str
    #: Address of the dashboard's page about jobs; "" when the cluster has no dashboard.
    dashboard: str
    #: Id of the cluster's process.
    pid: int
    #: Workers that the cluster was started with.
    num_workers: int
    #: The cluster's certificate, PEM text.
    certificate: str = field(repr=False)
    #: Private key of the certificate, PEM text.
    key: str = field(repr=False)

    @property
    def security(self) -> Security:
        """Security object for a client of this cluster."""
        return security_with(self.certificate, self.key)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a state file that only this user can have written or read.

        Raises PermissionError for a file of another user or with wider permissions; OSError, ValueError or TypeError
        for one that cannot be read.
        """
        with path.open(encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
                raise PermissionError(f"{path} is {stat.filemode(facts.st_mode)} and of user {facts.st_uid}")
            return cls(**json.load(file))

    def write(self, path: Path) -> None:
        """Replace the file, for this user only."""
        scratch = path.with_suffix(f".{os.getpid()}")
        make_private(path.parent)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        scratch.replace(path)


def state_file() -> Path:
    """Path of the state file of this user's background cluster on this machine."""
    return default_cache_root() / "clusters" / f"{platform.node() or 'local'}.json"


def background_security(address: str) -> Security | None:
    """Security object for a client of this user's background cluster; None if the cluster has another address."""
    with suppress(OSError, ValueError, TypeError):
        found = BackgroundCluster.read(state_file())
        return found.security if found.address == address else None
    return None
