"""`BackgroundCluster`: the file by which commands of this user find the background cluster of this machine.

It holds the cluster's key, so that only its owner may read it, and what another user has put there is not read.
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

from ...engine.local_cache import default_cache_root, make_private
from .security import security_with


@dataclass(frozen=True, slots=True)
class BackgroundCluster:
    """Where the cluster is, and what connects to it. `dashboard`: "" when there is none."""

    address: str
    dashboard: str
    pid: int
    num_workers: int
    certificate: str = field(repr=False)
    key: str = field(repr=False)

    @property
    def security(self) -> Security:
        """For a client of it."""
        return security_with(self.certificate, self.key)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What its owner has written. Raises OSError, ValueError or TypeError, also for a file that others may have
        written or read.
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
    """Where the cluster of this user on this machine writes its address."""
    return default_cache_root() / "clusters" / f"{platform.node() or 'local'}.json"


def background_security(address: str) -> Security | None:
    """For the background cluster of this user, if it has this address; else None."""
    with suppress(OSError, ValueError, TypeError):
        found = BackgroundCluster.read(state_file())
        return found.security if found.address == address else None
    return None
