"""Adapters of a run on one worker: fetched once, passed on between workers, and no file where none belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lorabatch.engine.peft.audit import AdapterAudit
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.migration.peers import AdapterFiles, FetchAdapter, PeerLostError
from lorabatch.pipeline.worker.adapters import AdapterCache

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x00weights"}
PEER = "tcp://peer:1"
NOWHERE = "memory://nowhere/alpha"


class FakePeers:
    """Stands for the other workers. `reply` answers a fetch: it returns the files, or raises."""

    def __init__(self, reply: Callable[[], Mapping[str, bytes]] = lambda: FILES) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._reply = reply

    async def ask(self, address: str, request: FetchAdapter, timeout_s: float) -> AdapterFiles:
        self.asked.append(address)
        await self.gate.wait()
        return AdapterFiles(self._reply())


def no_reply() -> Mapping[str, bytes]:
    raise PeerLostError(f"{PEER} does not reply")


def record(name: str, url: str, verdict: str = "exact") -> AdapterRecord:
    return AdapterRecord.model_validate({"name": name, "url": url, "verdict": verdict, "sha256": f"sha-{name}"})


@pytest.fixture
def alpha(tmp_path: Path) -> Path:
    folder = tmp_path / "alpha"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Alpha in storage, fetched into a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/cached/alpha/{name}", content)
    return "memory://cached/alpha"


def cache_of(url: str, folder: Path, peers: FakePeers | None = None, more: Iterable[AdapterRecord] = ()) -> Any:
    adapters = [record("alpha", url), *more]
    store = JobStore(str(folder.parent / "output"))
    return AdapterCache(peers or FakePeers(), lambda: adapters, store, no_audit, {}, folder)  # type: ignore[arg-type]


def no_audit(name: str, folder: Path) -> AdapterAudit:
    raise AssertionError(f"{name}: nothing is to be learnt of an adapter that is known by its content")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_local_adapter_stays_where_it_is(alpha: Path, tmp_path: Path, prefix: str) -> None:
    async def story() -> None:
        peers = FakePeers()
        cache = cache_of(f"{prefix}{alpha}", tmp_path / "copies", peers)
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert (Path(found.folder), found.name, peers.asked) == (alpha, "alpha", [])
        assert not (tmp_path / "copies").exists()

    asyncio.run(story())


def test_an_adapter_in_storage_is_copied_from_the_named_worker(tmp_path: Path) -> None:
    async def story() -> None:
        cache = cache_of(NOWHERE, tmp_path / "copies")
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert Path(found.folder).parent == tmp_path / "copies"
        assert content(Path(found.folder)) == await cache.files("sha-alpha") == FILES

    asyncio.run(story())


def test_a_worker_that_does_not_reply_is_replaced_by_storage(storage: str, tmp_path: Path) -> None:
    async def story() -> None:
        cache = cache_of(storage, tmp_path / "copies", FakePeers(no_reply))
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert content(Path(found.folder)) == FILES
        assert not (tmp_path / "copies").exists()

    asyncio.run(story())


def test_requests_for_an_adapter_that_is_being_fetched_wait_for_that_fetch(tmp_path: Path) -> None:
    async def story() -> None:
        peers = FakePeers()
        peers.gate.clear()
        cache = cache_of(NOWHERE, tmp_path / "copies", peers)
        asked = [asyncio.create_task(cache.get(["sha-alpha"], {"sha-alpha": PEER})) for _ in range(3)]
        while not peers.asked:
            await asyncio.sleep(0)
        peers.gate.set()
        assert len({found["sha-alpha"].folder for found in await asyncio.gather(*asked)}) == 1
        assert peers.asked == [PEER]

    asyncio.run(story())


def test_a_fetch_that_fails_leaves_the_next_request_to_try_another_worker(tmp_path: Path) -> None:
    async def story() -> None:
        cache = cache_of(NOWHERE, tmp_path / "copies")
        failing = asyncio.create_task(cache.get(["sha-alpha"], {}))
        waiting = asyncio.create_task(cache.get(["sha-alpha"], {"sha-alpha": PEER}))
        with pytest.raises(StorageError, match="nowhere/alpha"):
            await failing
        assert content(Path((await waiting)["sha-alpha"].folder)) == FILES

    asyncio.run(story())


@pytest.mark.parametrize("name", ["../outside", "a/b", "/etc/passwd", "..", ".", ""])
def test_a_copy_whose_file_names_lead_elsewhere_is_refused_and_nothing_is_left(
    storage: str, tmp_path: Path, name: str
) -> None:
    async def story() -> None:
        peers = FakePeers(lambda: {"adapter_config.json": b"{}", name: b"x"})
        cache = cache_of(storage, tmp_path / "copies", peers)
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert content(Path(found.folder)) == FILES
        assert not (tmp_path / "copies").exists()

    asyncio.run(story())


def test_refused_adapters_have_no_folder_and_missing_ones_are_named(tmp_path: Path) -> None:
    async def story() -> None:
        more = [record("broken", "/nowhere", "refused"), record("gone", str(tmp_path / "gone"))]
        cache = cache_of(NOWHERE, tmp_path, more=more)
        with pytest.raises(KeyError):
            await cache.get(["sha-broken"], {})
        with pytest.raises(StorageError, match="gone"):
            await cache.get(["sha-gone"], {})

    asyncio.run(story())
