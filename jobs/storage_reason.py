"""What storage answered, in one plain sentence that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from .secrets import scrubbed


def storage_reason(error: BaseException, storage_options: Mapping[str, Any], url: str = "") -> str:
    """One plain sentence for what storage answered about `url`, and what to do. Free of secrets."""
    detail = scrubbed(str(error), storage_options, url) or type(error).__name__
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        return f"access was refused ({detail}). Check the permissions of the file and of the folders above it."
    if isinstance(error, PermissionError) or "Credentials" in kind or "Forbidden" in kind:
        return (
            f"access was refused ({detail}). Check the credentials in the environment or in "
            "--storage-options, and what they may do."
        )
    if isinstance(error, FileNotFoundError):
        return f"not found ({detail}). Check the path or the bucket's name."
    if isinstance(error, NotADirectoryError):
        return f"expected a folder ({detail}). Name another one."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Free some space, then resume."
    if isinstance(error, ImportError):
        return f"a package is missing: {detail}"
    if isinstance(error, ValueError) and "rotocol" in detail:
        return f"{detail}. Use a local path or a URL that fsspec knows, such as s3://bucket/folder."
    if isinstance(error, ConnectionError | TimeoutError) or "connect" in detail.lower() or "Timeout" in kind:
        return f"nobody answers ({detail}). Check the network, and the endpoint in --storage-options if there is one."
    return detail
