"""Tells local paths, hub ids and URLs from each other."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Last part of a URL that stands for the latest checkpoint of a training run.
LATEST = "latest"
# A revision is a branch, a tag, a commit, or a reference such as refs/pr/1.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/(?P<name>[A-Za-z0-9][\w.-]*))(?:@(?P<revision>\w[\w./-]*))?")
_WILDCARDS = "*?["


def has_wildcard(text: str) -> bool:
    """Whether a path, or a part of one, has a sign that stands for other names in a glob."""
    return any(sign in text for sign in _WILDCARDS)


def is_hub_id(url: str) -> bool:
    """Whether this is the id of a repository on the Hugging Face hub, `OWNER/NAME` or `OWNER/NAME@REVISION`, and no
    path that exists.
    """
    return _HUB_ID.fullmatch(url) is not None and not is_local_path(url)


def hub_parts(hub_id: str) -> tuple[str, str, str | None]:
    """Id and name of a repository, and the revision; None for the newest. `hub_id`: as `is_hub_id` accepts it."""
    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    return match["id"], match["name"], match["revision"]


def is_local_path(url: str) -> bool:
    """Whether this is a path that exists, or `RUN/latest` of a folder that does."""
    path = Path(absolute(url))
    return "://" not in url and (path.exists() or (path.name == LATEST and path.parent.is_dir()))


def absolute(url: str) -> str:
    """A local path made independent of the working directory; URLs come back as they are."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))


def absolute_if_local(url: str) -> str:
    """A path of this machine as an absolute path; another URL, or a hub id, as it is."""
    return absolute(url) if is_local_path(url) else url
