"""Records where and with what a figure was measured: machine, commit, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lorabatch.kernels.native import native_build

#: Environment variable that names the commit of files that were copied to a machine without their repository.
COMMIT_VARIABLE = "LORABATCH_COMMIT"


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """Date, commit, machine and versions, as they stand in result files."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "compiled_kernels": native_build(),
        },
        "versions": installed_versions(packages),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Package -> its version, None where it is not installed."""
    return {name: _version(name) for name in packages}


def commit() -> str | None:
    """The commit that the variable `LORABATCH_COMMIT` names, else the checked-out one, marked if files differ from it.
    None outside a checkout or without git."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """The processor's name as its maker gives it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
