"""A background cluster that is about to end, and the file by which commands find it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lorabatch.pipeline.cluster.background import BackgroundCluster, withdraw

OWN = BackgroundCluster("tcp://127.0.0.1:1", "", 1, 2)


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
    path.write_text(json.dumps(asdict(found)))
    assert withdraw(path, OWN, AskedClient(is_busy=is_busy)) != is_busy  # type: ignore[arg-type]
    assert path.exists() == is_left
    assert list(tmp_path.glob("*.lock")) == []
