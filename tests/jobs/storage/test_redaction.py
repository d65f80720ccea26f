"""Secrets stay out of what is written or shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorabatch.jobs.errors import JobRequestError, StorageError
from lorabatch.jobs.input.files import read_footers
from lorabatch.jobs.opening.adapters import find_adapters
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.storage.local_copy import local_folder
from lorabatch.jobs.storage.location import Location
from lorabatch.jobs.storage.redaction import is_redacted, redacted_url, scrubbed


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/plain/path?x", "/plain/path?x"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("https://host/f.parquet?sig=abc&x=1", "https://host/f.parquet?***"),
        ("https://user@host:80/f", "https://***@host:80/f"),
        ("s3://key:sec/ret@bucket/a", "s3://***@bucket/a"),
        ("https://host:80/a@b", "https://host:80/a@b"),
        ("tls://[::1]:8786", "tls://[::1]:8786"),
        ("https://u:pw@[::1]:80/f", "https://***@[::1]:80/f"),
        ("https://host/f#token", "https://host/f#***"),
        ("https://proxy/https://u:pw@host/f?sig=1", "https://proxy/https://***@host/f?***"),
        ("simplecache::ftp://user:pw@host/x", "simplecache::ftp://***@host/x"),
        ("zip://a.csv::https://u:pw@host/x.zip", "zip://a.csv::https://***@host/x.zip"),
        ("zip://a::simplecache::https://host/x.zip?sig=1", "zip://a::simplecache::https://host/x.zip?***"),
        ("zip://a?b=1::s3://bucket/x.zip", "zip://a?***::s3://bucket/x.zip"),
        ("zip://a.csv::/local/x.zip", "zip://a.csv::/local/x.zip"),
        ("https://host/f?sig=abc::def", "https://host/f?***"),
        ("a::b", "a::b"),
    ],
)
def test_urls_are_shown_without_what_opens_them(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


WORDS = st.text("abc019", min_size=1, max_size=6)
# All that may stand before an "@" without a percent sign, "::" and "@" too.
PASSWORDS = st.text("abcXYZ019:@.%!$&'()*+,;=[]~_-", max_size=12).map(lambda text: f"hush{text}hush")


@st.composite
def links(draw: st.DrawFn) -> str:
    """One link of a chain: with a password, with a signature, with both, with neither, or a bare name."""
    scheme = draw(st.sampled_from(["https", "ftp", "s3", "zip", "arrow_hdfs"]))
    user = f"{draw(WORDS)}:{draw(PASSWORDS)}@" if draw(st.booleans()) else ""
    query = f"?sig={draw(PASSWORDS)}" if draw(st.booleans()) else ""
    named = f"{scheme}://{user}{draw(WORDS)}/{draw(WORDS)}{query}"
    return draw(st.sampled_from([named, "simplecache"]))


@given(st.lists(links(), min_size=1, max_size=3).map("::".join))
@example("https://0/0?sig=hush::hush::https://0/0")
@example("https://0/0?sig=hush::Xhush::hush::zip://b.csv::https://0/0")
@example("zip://a.csv::simplecache::https://0:hush::hush@0/0?sig=hush::hush")
def test_no_link_of_a_chain_shows_what_opens_it(url: str) -> None:
    shown = redacted_url(url)
    assert "hush" not in shown
    assert is_redacted(shown) == ("hush" in url)
    assert redacted_url(shown) == shown
    assert "hush" not in scrubbed(f"cannot open '{url}' now", {}, url)


@pytest.mark.parametrize("chain", ["{}", "simplecache::{}", "zip://a.parquet::{}"])
def test_a_password_in_a_chain_is_neither_recorded_nor_shown_nor_taken_for_adapters(chain: str, tmp_path: Path) -> None:
    url = chain.format("memory://u:hush@nowhere/x")
    specs = [JobSpec(model=url, input=url, output=url, adapters=adapters) for adapters in (url, {"a": url})]
    texts = [*(str(spec.without_secrets().model_dump()) for spec in specs), *map(repr, specs)]
    with pytest.raises(JobRequestError, match="never recorded") as refused:
        find_adapters({"a": url}, {})
    with pytest.raises(JobRequestError, match="given twice") as twice:
        JobSpec(model=url, input=url, output=url, adapters=[f"a={url}", f"a={url}"])
    with pytest.raises(JobRequestError) as unread:
        read_footers([url], {})
    with pytest.raises(StorageError) as unfetched:
        local_folder(url, {}, tmp_path)
    with pytest.raises(StorageError) as unlisted:
        Location(url).read("a")
    texts += [str(caught.value) for caught in (refused, twice, unread, unfetched, unlisted)]
    assert [text for text in texts if "hush" in text] == []
    assert all("***" in text for text in texts)


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
