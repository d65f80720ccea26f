"""Adapters of a job on one worker: found once, passed on between workers, and no file where none belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.pipeline.adapter_shelf import AdapterShelf

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x00weights"}


def record(name: str, url: str, verdict: str = "exact") -> AdapterRecord:
    return AdapterRecord.model_validate({"name": name, "url": url, "verdict": verdict, "sha256": f"sha-{name}"})


@pytest.fixture
def alpha(tmp_path: Path) -> Path:
    folder = tmp_path / "alpha"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_local_adapter_stays_where_it_is(alpha: Path, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path / "copies")
    (found,) = shelf.local(["sha-alpha"])
    assert (found.folder, found.source.name) == (alpha, "alpha")
    assert not (tmp_path / "copies").exists()


def test_what_lies_in_storage_is_far_until_it_is_here(tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "copies")
    assert shelf.far(["sha-alpha"]) == ["sha-alpha"]
    shelf.put("sha-alpha", FILES)
    assert shelf.far(["sha-alpha"]) == []
    (found,) = shelf.local(["sha-alpha"])
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == FILES


def test_a_local_adapter_is_never_far(alpha: Path, tmp_path: Path) -> None:
    adapters = [record("alpha", str(alpha)), record("beta", f"file://{alpha}")]
    assert AdapterShelf(adapters, {}, tmp_path).far(["sha-alpha", "sha-beta"]) == []


def test_an_adapter_travels_from_shelf_to_shelf(alpha: Path, tmp_path: Path) -> None:
    owner = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path / "owner")
    owner.local(["sha-alpha"])
    helper = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "helper")
    helper.put("sha-alpha", owner.files("sha-alpha"))
    assert helper.files("sha-alpha") == FILES


def test_what_is_not_here_cannot_be_passed_on(alpha: Path, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path)
    with pytest.raises(KeyError):
        shelf.files("sha-alpha")


@pytest.mark.parametrize("name", ["../outside", "a/b", "/etc/passwd", "..", ".", ""])
def test_a_copy_whose_file_names_lead_elsewhere_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "copies")
    with pytest.raises(ValueError, match="is no file name"):
        shelf.put("sha-alpha", {"adapter_config.json": b"{}", name: b"x"})
    assert not (tmp_path / "copies").exists()
    assert shelf.far(["sha-alpha"]) == ["sha-alpha"]


def test_the_first_copy_stays_when_two_come_at_once(tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "copies")
    shelf.put("sha-alpha", FILES)
    (first,) = shelf.local(["sha-alpha"])
    shelf.put("sha-alpha", FILES)
    assert shelf.local(["sha-alpha"]) == [first]


def test_refused_adapters_have_no_place_and_missing_ones_say_so(tmp_path: Path) -> None:
    adapters = [record("broken", "/nowhere", "refused"), record("gone", str(tmp_path / "gone"))]
    shelf = AdapterShelf(adapters, {}, tmp_path)
    with pytest.raises(KeyError):
        shelf.local(["sha-broken"])
    with pytest.raises(StorageError, match="gone"):
        shelf.local(["sha-gone"])
