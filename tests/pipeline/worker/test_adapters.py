"""Adapters of a job on one worker: found once, passed on between workers, and no file where none belongs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.pipeline.worker.adapters import AdapterShelf

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
    assert shelf.is_far("sha-alpha")
    shelf.put("sha-alpha", FILES)
    assert not shelf.is_far("sha-alpha")
    (found,) = shelf.local(["sha-alpha"])
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == FILES


def test_a_local_adapter_is_never_far(alpha: Path, tmp_path: Path) -> None:
    adapters = [record("alpha", str(alpha)), record("beta", f"file://{alpha}")]
    shelf = AdapterShelf(adapters, {}, tmp_path)
    assert not any(map(shelf.is_far, ["sha-alpha", "sha-beta"]))


def test_an_adapter_travels_from_shelf_to_shelf(alpha: Path, tmp_path: Path) -> None:
    owner = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path / "owner")
    (there,) = owner.local([owner.id_of("alpha")])
    assert there.folder == alpha
    helper = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "helper")
    helper.put("sha-alpha", owner.files("sha-alpha"))
    assert helper.files("sha-alpha") == FILES


def test_what_nobody_has_brought_yet_is_fetched_to_be_passed_on(alpha: Path, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path)
    assert shelf.files("sha-alpha") == FILES
    with pytest.raises(KeyError):
        shelf.files("sha-of-another-job")


def test_who_asks_for_an_adapter_on_its_way_gets_the_one_that_comes(tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", "s3://no-such-bucket/alpha")], {}, tmp_path / "copies")
    with ThreadPoolExecutor(1) as pool:
        with shelf.bringing("sha-alpha") as is_ours:
            assert is_ours
            assert shelf.is_coming("sha-alpha")
            with shelf.bringing("sha-alpha") as is_ours_too:
                assert not is_ours_too
            asked = pool.submit(shelf.local, ["sha-alpha"])
            shelf.put("sha-alpha", FILES)
        assert {path.name for path in asked.result(60)[0].folder.iterdir()} == set(FILES)
    assert not shelf.is_coming("sha-alpha")


def test_one_that_does_not_come_is_fetched_by_who_waited_for_it(alpha: Path, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", str(alpha))], {}, tmp_path / "copies")
    with ThreadPoolExecutor(1) as pool:
        with shelf.bringing("sha-alpha"):
            asked = pool.submit(shelf.local, ["sha-alpha"])
        assert asked.result(60)[0].folder == alpha


@pytest.mark.parametrize("name", ["../outside", "a/b", "/etc/passwd", "..", ".", ""])
def test_a_copy_whose_file_names_lead_elsewhere_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    shelf = AdapterShelf([record("alpha", "s3://bucket/alpha")], {}, tmp_path / "copies")
    with pytest.raises(ValueError, match="is no file name"):
        shelf.put("sha-alpha", {"adapter_config.json": b"{}", name: b"x"})
    assert not (tmp_path / "copies").exists()
    assert shelf.is_far("sha-alpha")


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
