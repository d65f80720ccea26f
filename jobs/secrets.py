"""Keep secrets out of records, logs and messages: what is in `storage_options`, and passwords inside URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_MASK = "***"
_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>()]+")
# Shorter strings ("", "us") are no secrets, and masking them would garble ordinary text.
_MIN_SECRET_CHARS = 4


def redacted_url(url: str) -> str:
    """The URL without user, password and query (signatures live there); a plain path comes back unchanged."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    netloc = f"{_MASK}@{host}" if at else parts.netloc
    return urlunsplit((parts.scheme, netloc, parts.path, _MASK if parts.query else "", ""))


def scrubbed(text: str, storage_options: Mapping[str, Any]) -> str:
    """`text` with every string found in `storage_options` masked, and what opens the URLs in it, for messages made by
    other libraries.
    """
    text = _URL.sub(lambda found: redacted_url(found[0]), text)
    for secret in sorted(_strings(storage_options), key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, _MASK)
    return text


def is_redacted(url: str) -> bool:
    """Whether `redacted_url` has taken something out of this URL: then it cannot be opened."""
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
