"""A background cluster that is about to end, and the file by which commands find it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorabatch.pipeline.cluster.background import withdraw
from lorabatch.pipeline.cluster.background_state import BackgroundCluster, background_security, state_file

OWN = BackgroundCluster("tls://127.0.0.1:1", "", 1, 2, "certificate", "key")


class AskedClient:
    """A client whose cluster is busy or not."""

    id = "own"

    def __init__(self, *, is_busy: bool) -> None:
        self._is_busy = is_busy

    def run_on_scheduler(self, *_: Any, **__: Any) -> bool:
        return self._is_busy


@pytest.mark.parametrize(
    ("is_busy", "found", "is_left"), [(False, OWN, False), (True, OWN, True), (False, replace(OWN, pid=2), True)]
)
def test_a_cluster_withdraws_its_own_state_file_unless_it_is_busy(
    is_busy: bool, found: BackgroundCluster, is_left: bool, tmp_path: Path
) -> None:
    path = tmp_path / "host.json"
    found.write(path)
    assert withdraw(path, OWN, AskedClient(is_busy=is_busy)) != is_busy  # type: ignore[arg-type]
    assert path.exists() == is_left
    assert list(tmp_path.glob("*.lock")) == []


def test_the_key_is_for_the_owner_alone_and_in_no_message(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "host.json"
    before = os.umask(0)
    try:
        OWN.write(path)
        replace(OWN, pid=2).write(path)
    finally:
        os.umask(before)
    modes = [found.stat().st_mode & 0o777 for found in (path, path.parent, path.parents[1])]
    assert modes == [0o600, 0o700, 0o700]
    assert BackgroundCluster.read(path) == replace(OWN, pid=2)
    assert [found.name for found in path.parent.iterdir()] == ["host.json"]
    assert "key" not in repr(OWN)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o666])
def test_a_state_file_that_others_may_have_read_or_written_is_not_read(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    OWN.write(path)
    path.chmod(mode)
    with pytest.raises(PermissionError):
        BackgroundCluster.read(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_a_state_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    OWN.write(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="of user 65534"):
        BackgroundCluster.read(path)


def test_an_address_of_the_background_cluster_finds_its_key_and_others_find_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert background_security(OWN.address) is None
    OWN.write(state_file())
    found = background_security(OWN.address)
    assert found is not None
    assert (found.tls_client_key, found.tls_ca_file, found.require_encryption) == ("key", "certificate", True)
    assert background_security("tls://127.0.0.1:2") is None
    state_file().write_text(json.dumps({"address": OWN.address}))
    assert background_security(OWN.address) is None
