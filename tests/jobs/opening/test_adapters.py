"""Names of adapters and where they are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.opening.adapters import find_adapters
from lorabatch.jobs.storage.location import Location


def test_each_folder_in_a_folder_is_an_adapter(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    location = Location(url, options)
    for name in ("pirate", "sql", "_old", ".git"):
        location.write(f"{name}/adapter_config.json", b"{}")
    location.write("README.md", b"not a folder")
    assert find_adapters(url, options) == {"pirate": f"{url}/pirate", "sql": f"{url}/sql"}
    assert find_adapters(f"{url}/", options) == find_adapters(url, options)


def test_names_with_urls_are_taken_as_they_are() -> None:
    assert find_adapters({"b": "s3://x/b", "a": "/a"}, {}) == {"a": "/a", "b": "s3://x/b"}
    assert find_adapters(None, {}) == {}


def test_a_folder_that_is_itself_an_adapter_is_that_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "global_step500").mkdir()
    assert find_adapters(str(folder), {}) == {"checkpoint-500": str(folder)}
    assert find_adapters(f"{folder}/", {}) == {"checkpoint-500": str(folder)}


def test_a_folder_without_adapters_is_refused(tmp_path: Path) -> None:
    for url in (tmp_path, tmp_path / "missing"):
        with pytest.raises(JobRequestError, match="no adapter folders there"):
            find_adapters(str(url), {})


def test_names_that_no_row_could_mean_are_refused() -> None:
    with pytest.raises(JobRequestError) as caught:
        find_adapters({"": "/a", "x\n": "/b", "y" * 300: "/c", "fine": "/d"}, {})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "..", "x\0y", "s3://bucket/x", "a\\b", "."])
def test_names_that_are_paths_or_urls_are_refused(name: str) -> None:
    with pytest.raises(JobRequestError, match="printable characters without slashes"):
        find_adapters({name: "/a"}, {})


def test_urls_that_carry_secrets_are_refused_without_showing_them() -> None:
    with pytest.raises(JobRequestError, match=r"a=https://host/x\?\*\*\*: carries a password") as caught:
        find_adapters({"a": "https://host/x?sig=topsecret", "b": "/fine"}, {})
    assert "topsecret" not in str(caught.value)


def test_an_impossible_url_is_explained() -> None:
    with pytest.raises(JobRequestError, match=r"adapters='zzz://x'.*Protocol not known"):
        find_adapters("zzz://x", {})
