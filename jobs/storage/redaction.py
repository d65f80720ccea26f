"""Keeps secrets out of records, logs and messages: values of `storage_options`, and passwords inside URLs.

`storage_reason` makes one plain sentence of an error of storage.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ...system.untrusted import printable
from ..errors import UnansweredError

_MASK = "***"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+._-]*"
# A URL in a text. The user and password before an "@" may have any sign, also a quote or a bracket.
_URL = re.compile(rf"\b{_SCHEME}://(?:[^\s/@]*@)?[^\s'\"<>()]+")
_AUTHORITY_END = re.compile(r"[/?#]")
_QUERY = re.compile(r"[?#]")
_PORT = re.compile(r"[^:]*(?::\d*)?|\[.*")
# Shorter strings ("", "us") are no secrets, and masking them would garble ordinary text.
_MIN_SECRET_CHARS = 4
#: Module that storage may need -> package to install for it, where their names differ.
INSTALLS = {
    "smbclient": "smbprotocol",
    "libarchive": "libarchive-c",
    "webdav4": "'webdav4[fsspec]'",
}


def redacted_url(url: str) -> str:
    """The URL without user, password and query (signatures live there), in every link of a chain; a plain path comes
    back unchanged.
    """
    return "::".join(map(_redacted_link, _links(url)))


def _links(url: str) -> list[str]:
    """The links of an fsspec chain of URLs, the whole URL where it is none."""
    return _chain_sign().split(url) if "::" in url else [url]


@cache
def _chain_sign() -> re.Pattern[str]:
    """The "::" between the links of an fsspec chain (`zip://a.csv::https://host/a.zip`), of which some are a name alone
    (`simplecache::s3://…`). Any other "::" is part of a link, in a password, a signature or an IPv6 address.
    """
    # Imported here: commands that read no URL of a chain start without fsspec.
    from fsspec import available_protocols

    names = "|".join(map(re.escape, sorted(available_protocols())))
    return re.compile(rf"::(?=(?:(?:{names})::)*{_SCHEME}://)")


def _redacted_link(link: str) -> str:
    scheme, separator, _ = link.partition("://")
    if not separator:
        return link
    user, place, query = _parts(link)
    # Some services take a whole URL as their path.
    shown = _redacted_link(place) if "://" in place else place
    return f"{scheme}://{_MASK + '@' if user is not None else ''}{shown}{query[:1] + _MASK if query[1:] else ''}"


def _parts(link: str) -> tuple[str | None, str, str]:
    """The parts of a URL: user and password (None without); host and path; query and fragment with their first sign."""
    rest = link.partition("://")[2]
    end = found.start() if (found := _AUTHORITY_END.search(rest)) else len(rest)
    # Text after a ":" that cannot be a port is a password, and may contain a slash, as keys of object stores often do.
    if "@" not in rest[:end] and not _PORT.fullmatch(rest[:end]) and "@" in rest:
        end = len(rest)
    user, at, host = rest[:end].rpartition("@")
    tail = host + rest[end:]
    query = found.start() if (found := _QUERY.search(tail)) else len(tail)
    return user if at else None, tail[:query], tail[query:]


def scrubbed(text: str, storage_options: Mapping[str, Any], url: str = "") -> str:
    """`text` without secrets, for messages made by other libraries: every string in `storage_options` is masked, and
    user, password and query of every URL. The secrets of `url` are masked also when the text holds only a piece of it.
    """
    # Known secrets are masked first, since the end of a URL inside a text is not certain.
    for secret in sorted((*_strings(storage_options), *_url_secrets(url)), key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, _MASK)
    return _URL.sub(lambda found: redacted_url(found[0]), text)


def _url_secrets(url: str) -> Iterator[str]:
    """User and password together, the password alone, and the query, of every link that has them."""
    for link in _links(url):
        if "://" not in link:
            continue
        user, place, query = _parts(link)
        if user is not None:
            yield user
            yield user.partition(":")[2]
        yield query[1:]
        if "://" in place:
            yield from _url_secrets(place)


def is_redacted(url: str) -> bool:
    """Whether `redacted_url` has masked something in this URL, so that it cannot be opened."""
    return "://" in url and _MASK in url


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def storage_reason(error: BaseException, storage_options: Mapping[str, Any], url: str = "") -> str:
    """One plain sentence for an error of storage about `url`, and what to do. Free of secrets."""
    detail = printable(scrubbed(str(error), storage_options, url) or type(error).__name__)
    kind = type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the volume is read-only ({detail}). Mount it for writing, or name another place."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM) and error.filename:
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
        # fsspec has a sentence of its own in place of the module's name
        missing = error.__context__ if error.__context__ is not None else error
        if not isinstance(missing, ModuleNotFoundError) or not missing.name:
            return f"a package for this storage cannot be imported ({detail}). Install it again."
        module = missing.name.partition(".")[0]
        return f"a package for this storage is missing: pip install {INSTALLS.get(module, module)}"
    if isinstance(error, ValueError) and "rotocol" in detail:
        return f"{detail}. Use a local path or a URL that fsspec knows, such as s3://bucket/folder."
    if isinstance(error, UnansweredError) and error.has_status:
        return f"the store refuses for now ({detail}). Go on when it answers again."
    if isinstance(error, ConnectionError | TimeoutError) or "connect" in detail.lower() or "Timeout" in kind:
        return f"no reply ({detail}). Check the network, and the endpoint in --storage-options if there is one."
    return detail
