"""Which adapters a job has, and where each lies. Names come from folders or from `NAME=URL`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import JobRequestError, StorageError
from .location import Location
from .secrets import redacted_url

_CONFIG = "adapter_config.json"
_MAX_NAME_CHARS = 256


def find_adapters(adapters: str | Mapping[str, str] | None, storage_options: Mapping[str, Any]) -> dict[str, str]:
    """Name -> folder or URL, sorted by name.

    A folder holds one PEFT folder per adapter, named as rows ask for it; names that start with `_` or `.` are
    passed over. Raises `JobRequestError` with every problem.
    """
    if adapters is None:
        return {}
    found = _in_folder(adapters, storage_options) if isinstance(adapters, str) else dict(adapters)
    problems = [problem for name in found if (problem := _name_problem(name)) is not None]
    problems += [
        f"adapters: {name}={redacted_url(url)}: carries a password or a signature, which is never recorded, and "
        "workers fetch adapters as recorded. Put what opens it into --storage-options."
        for name, url in found.items()
        if redacted_url(url) != url
    ]
    if problems:
        raise JobRequestError(*problems)
    return dict(sorted(found.items()))


def _in_folder(url: str, storage_options: Mapping[str, Any]) -> dict[str, str]:
    shown = redacted_url(url)
    folder = Location(url, storage_options)
    try:
        entries = folder.list()
    except StorageError as error:
        raise JobRequestError(f"adapters={shown!r}: {error}") from None
    if _CONFIG in entries:
        raise JobRequestError(
            f"adapters={shown!r}: is one adapter, not a folder of adapters. Give the folder above it, or a name "
            f"for it: --adapters NAME={shown}."
        )
    names = [name for name, size in entries.items() if size is None and not name.startswith(("_", "."))]
    if not names:
        raise JobRequestError(
            f"adapters={shown!r}: no adapter folders there. Expected one folder per adapter, each with "
            f"{_CONFIG} and adapter_model.safetensors."
        )
    return {name: f"{folder.url}/{name}" for name in names}


def _name_problem(name: str) -> str | None:
    """Names stand in rows, records and reports, and are never made into paths; one that is a path is a mistake, or
    an attempt at reading elsewhere.
    """
    is_path = name in (".", "..") or any(sign in name for sign in "/\\")
    if not name or len(name) > _MAX_NAME_CHARS or not name.isprintable() or is_path:
        return (
            f"adapters: name {name[:_MAX_NAME_CHARS]!r}: expected 1 to {_MAX_NAME_CHARS} printable characters without "
            "slashes. Give it another name: --adapters NAME=URL."
        )
    return None
