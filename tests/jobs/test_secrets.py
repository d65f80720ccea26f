"""Secrets stay out of what is written or shown."""

from __future__ import annotations

import pytest

from lorabatch.jobs.secrets import is_redacted, redacted_url, scrubbed
from lorabatch.jobs.spec import JobSpec


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/plain/path?x", "/plain/path?x"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("https://host/f.parquet?sig=abc&x=1", "https://host/f.parquet?***"),
        ("https://user@host:80/f", "https://***@host:80/f"),
    ],
)
def test_urls_are_shown_without_what_opens_them(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_urls_inside_messages_lose_what_opens_them() -> None:
    text = "403, url='https://user:pw@host/f.parquet?X-Signature=abc', see (https://docs/x) and s3://bucket/a?b."
    shown = scrubbed(text, {})
    assert shown == "403, url='https://***@host/f.parquet?***', see (https://docs/x) and s3://bucket/a?***"
    assert is_redacted("https://host/f?***")
    assert not is_redacted("/a/***/b")


def test_a_spec_is_shown_without_what_opens_its_urls() -> None:
    spec = JobSpec(
        model="https://u:pw1@host/m",
        input="https://host/x?sig=pw2",
        output="/out",
        adapters={"a": "https://host/a?sig=pw3"},
        storage_options={"secret": "pw4"},
    )
    assert "pw" not in repr(spec)
    assert "pw" not in str(spec)


def test_every_string_of_the_options_is_masked_wherever_it_stands() -> None:
    options = {"key": "AKIA1", "nested": {"list": ["token-9", 5, None], "short": "us"}, "secret": "AKIA1-long"}
    text = "AKIA1-long, AKIA1 and token-9 in us"
    assert scrubbed(text, options) == "***, *** and *** in us"
