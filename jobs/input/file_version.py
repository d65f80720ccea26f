"""Finds the version of an input file, so that a job notices a file that changed between its footer and its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ..record import FileVersion

# The last one is of files on the Hugging Face hub.
_TAG_NAMES = ("ETag", "etag", "blob_id")
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified")
# Seconds by which times of change may be off: clocks of file systems are coarse.
_SLACK_S = 2.0
_WEB = ("http://", "https://")


def file_version(fs: Any, path: str) -> FileVersion:
    """The version of a file as storage has it now, or had it when the file was listed."""
    seen_s = time.time()
    return _version(fs.info(path), path, seen_s)


def has_changed(fs: Any, path: str, before: FileVersion) -> bool:
    """Whether the file has been replaced or written to since `before`.

    A time of change counts only when it is later than `before.seen_s`: workers may have their own copies of local
    files.
    """
    fs.invalidate_cache(path)
    now = _version(fs.info(path), path, 0.0)
    if before.tag and now.tag:
        return before.tag != now.tag
    return now.modified_s != before.modified_s and now.modified_s > before.seen_s - _SLACK_S


def _version(info: Mapping[str, Any], path: str, seen_s: float) -> FileVersion:
    # Servers of one web address need not agree on tags.
    tags = () if path.startswith(_WEB) else _TAG_NAMES
    tag = next((str(info[name]) for name in tags if info.get(name)), "")
    modified = next((info[name] for name in _TIME_NAMES if info.get(name)), 0.0)
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    modified_s = float(modified) if isinstance(modified, int | float) else 0.0
    return FileVersion(tag=tag.strip('"'), modified_s=modified_s, seen_s=seen_s)
