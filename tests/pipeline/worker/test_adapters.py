"""Adapters of a run on one worker: fetched once, passed on between workers, and no file where none belongs."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.engine.peft.audit import AdapterAudit
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.migration.peers import AdapterFiles, FetchAdapter, PeerLostError
from lorabatch.pipeline.worker import adapter_peers, adapters
from lorabatch.pipeline.worker.adapters import AdapterCache
from lorabatch.scheduler.messages import AdapterFetch

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x00weights"}
PEER = "tcp://peer:1"
NOWHERE = "memory://nowhere/alpha"
# Seconds that a worker waits for its own fetch when another asks for it.
_PATIENCE_S = 0.5


class FakePeers:
    """Stands for the other workers. `reply` answers a fetch: it returns the files, or raises."""

    def __init__(self, reply: Callable[[], Mapping[str, bytes]] = lambda: FILES, address: str = "tcp://here:1") -> None:
        self.address = address
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._reply = reply

    async def ask(self, address: str, request: FetchAdapter, timeout_s: float) -> AdapterFiles:
        if not request.name:
            self.asked.append(address)
        await self.gate.wait()
        files = self._reply()
        if not request.name:
            return AdapterFiles({name: len(content) for name, content in files.items()})
        piece = files[request.name][request.offset :][:4]
        return AdapterFiles(piece=piece, sha256=hashlib.sha256(piece).hexdigest())


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
        assert content(Path(found.folder)) == FILES
        listed = await cache.reply(FetchAdapter("sha-alpha"))
        assert listed.sizes == {name: len(each) for name, each in FILES.items()}
        for name, each in FILES.items():
            piece = await cache.reply(FetchAdapter("sha-alpha", name, 1))
            assert (piece.piece, piece.sha256) == (each[1:], hashlib.sha256(each[1:]).hexdigest())

    asyncio.run(story())


def test_a_worker_that_does_not_reply_is_replaced_by_storage(storage: str, tmp_path: Path) -> None:
    async def story() -> None:
        cache = cache_of(storage, tmp_path / "copies", FakePeers(no_reply))
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert content(Path(found.folder)) == FILES
        assert not list(tmp_path.glob("copies/*"))

    asyncio.run(story())


@pytest.mark.parametrize("fault", ["changed", "silent", "empty"])
def test_a_transfer_that_fails_in_the_middle_is_begun_again_from_storage(
    storage: str, tmp_path: Path, fault: str
) -> None:
    class Faulty(FakePeers):
        async def ask(self, address: str, request: FetchAdapter, timeout_s: float) -> AdapterFiles:
            found = await super().ask(address, request, timeout_s)
            if request.offset < 4:
                return found
            if fault == "silent":
                raise PeerLostError(f"{PEER} does not answer")
            return AdapterFiles(piece=found.piece[:-1] if fault == "changed" else b"", sha256=found.sha256)

    async def story() -> None:
        cache = cache_of(storage, tmp_path / "copies", Faulty())
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert content(Path(found.folder)) == FILES
        assert not list(tmp_path.glob("copies/*"))

    asyncio.run(story())


def test_a_worker_that_does_not_have_it_yet_is_asked_again(tmp_path: Path) -> None:
    class Coming(FakePeers):
        async def ask(self, address: str, request: FetchAdapter, timeout_s: float) -> AdapterFiles:
            found = await super().ask(address, request, timeout_s)
            return AdapterFiles() if not request.name and len(self.asked) < 3 else found

    async def story() -> None:
        peers = Coming()
        cache = cache_of(NOWHERE, tmp_path / "copies", peers)
        found = (await cache.get(["sha-alpha"], {"sha-alpha": PEER}))["sha-alpha"]
        assert (content(Path(found.folder)), len(peers.asked)) == (FILES, 3)

    asyncio.run(story())


def test_what_is_foreseen_is_fetched_before_a_shard_asks(storage: str, tmp_path: Path) -> None:
    async def story() -> None:
        cache = cache_of(storage, tmp_path / "copies", more=[record("gone", NOWHERE)])
        cache.foresee(AdapterFetch(each, None) for each in ("sha-gone", "sha-alpha", "sha-unknown"))
        fetched = tmp_path / "cache" / "lorabatch" / "fetched"
        while not list(fetched.glob("alpha-*")):
            await asyncio.sleep(0.01)
        found = (await cache.get(["sha-alpha"], {}))["sha-alpha"]
        assert Path(found.folder).parent == fetched
        with pytest.raises(StorageError, match="nowhere/alpha"):
            await cache.get(["sha-gone"], {})

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
        assert not list(tmp_path.glob("copies/*"))

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


def test_a_full_disk_costs_the_rows_of_what_it_has_no_room_for(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(url: str, versions: Any, options: Any, folder: Path, alike: Any) -> None:
        (folder / "torn").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story() -> None:
        store = JobStore(str(tmp_path / "output"))
        cache = AdapterCache(FakePeers(), lambda: [opened(0, storage)], store, no_audit, {}, tmp_path)  # type: ignore[arg-type]
        monkeypatch.setattr(adapters, "from_store", full)
        why = (await cache.get(["sha-opened-0"], {}))["sha-opened-0"]
        assert "no room for its files in " in why
        assert "No space left on device" in why
        assert RUN_AGAIN in why
        assert not list((tmp_path / "cache").rglob("torn"))

    asyncio.run(story())


def opened(number: int, url: str) -> AdapterRecord:
    """An adapter of which the job knows the versions of its files."""
    versions = {"adapter_config.json": "2 at 1", "adapter_model.safetensors": "8 at 1"}
    return record(f"opened-{number}", url).model_copy(update={"files": versions})


def copied(url: str, versions: Any, options: Any, folder: Path, alike: Any) -> None:
    """Stands for a store that has the files of all adapters."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


class Other(FakePeers):
    """Stands for another worker, whose adapters are those of `cache`."""

    cache: AdapterCache

    async def ask(self, address: str, request: FetchAdapter, timeout_s: float) -> AdapterFiles:
        self.asked.append(address)
        try:
            return await self.cache.reply(request)
        except StorageError as error:
            raise PeerLostError(str(error)) from None


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_workers_that_are_told_of_each_other_do_not_wait_for_each_other(
    num_workers: int, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a circle, each is told that the next one has the adapter."""
    monkeypatch.setattr(adapter_peers, "_COMING_S", _PATIENCE_S)

    async def story() -> None:
        names = [f"tcp://{number}:1" for number in range(num_workers)]
        sides = [Other(address=name) for name in names]
        caches = [cache_of(storage, tmp_path / f"copies-{i}", peers) for i, peers in enumerate(sides)]
        for number, peers in enumerate(sides):
            peers.cache = caches[(number + 1) % num_workers]
        began_s = time.monotonic()
        gets = (
            cache.get(["sha-alpha"], {"sha-alpha": names[(number + 1) % num_workers]})
            for number, cache in enumerate(caches)
        )
        found = await asyncio.gather(*gets)
        assert time.monotonic() - began_s < 3 * _PATIENCE_S
        assert all(content(Path(each["sha-alpha"].folder)) == FILES for each in found)
        assert any(peers.asked for peers in sides)

    asyncio.run(story())


def test_workers_that_share_copies_do_not_give_each_other_these(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that asks holds the lock of the copy, for which the other would wait."""
    monkeypatch.setattr(adapters, "from_store", copied)

    async def story() -> None:
        sides, store = (Other(), Other()), JobStore(str(tmp_path / "output"))
        one, other = (
            AdapterCache(peers, lambda: [opened(0, storage)], store, no_audit, {}, tmp_path)  # type: ignore[arg-type]
            for peers in sides
        )
        sides[0].cache = other
        began_s = time.monotonic()
        await one.get(["sha-opened-0"], {"sha-opened-0": PEER})
        assert time.monotonic() - began_s < 3
        assert sides[0].asked == [PEER]
        assert (one.use.storage_fetches, one.use.peer_fetches) == (1, 0)
        one.close()
        other.close()

    asyncio.run(story())


def test_a_worker_that_waits_for_many_others_gives_what_is_in_storage(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two workers that ask each other for many would both have no thread left to read what the other asks for."""
    monkeypatch.setattr(adapters, "from_store", copied)

    async def story() -> None:
        peers, store, count = FakePeers(), JobStore(str(tmp_path / "output")), 40
        peers.gate.clear()
        served = [opened(number, f"{storage}-{number}") for number in range(count)]
        cache = AdapterCache(peers, lambda: served, store, no_audit, {}, tmp_path)  # type: ignore[arg-type]
        ids = [each.sha256 for each in served]
        waits = asyncio.ensure_future(cache.get(ids[1:], dict.fromkeys(ids[1:], PEER)))
        while not peers.asked:
            await asyncio.sleep(0.01)
        listed = await asyncio.wait_for(cache.reply(FetchAdapter(ids[0])), 3)
        assert listed.sizes == {name: len(content) for name, content in FILES.items()}
        peers.gate.set()
        assert len(await waits) == count - 1
        assert len(peers.asked) == count - 1
        cache.close()

    asyncio.run(story())


def test_adapters_are_handed_over_as_they_come(alpha: Path, tmp_path: Path) -> None:
    async def story() -> None:
        peers = FakePeers()
        peers.gate.clear()
        late = record("late", NOWHERE)
        cache = cache_of(str(alpha), tmp_path / "copies", peers, [late])
        pieces = cache.arriving(["sha-late", "sha-alpha", "sha-late"], {"sha-late": PEER})
        assert (await anext(pieces)).keys() == {"sha-alpha"}
        coming = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.1)
        assert not coming.done()
        peers.gate.set()
        assert (await coming).keys() == {"sha-late"}
        assert await anext(pieces, None) is None

    asyncio.run(story())


def test_an_adapter_that_cannot_be_read_is_said_after_those_that_have_come(alpha: Path, tmp_path: Path) -> None:
    async def story() -> None:
        peers = FakePeers(no_reply)
        peers.gate.clear()
        cache = cache_of(str(alpha), tmp_path / "copies", peers, [record("gone", "memory://nowhere/gone")])
        pieces = cache.arriving(["sha-alpha", "sha-gone"], {"sha-gone": PEER})
        assert (await anext(pieces)).keys() == {"sha-alpha"}
        peers.gate.set()
        with pytest.raises(StorageError):
            await anext(pieces)
        assert (await cache.get(["sha-alpha"], {})).keys() == {"sha-alpha"}

    asyncio.run(story())


@pytest.mark.parametrize("num_ahead", [0, 3, 6])
def test_what_was_fetched_stays_until_its_shard_has_it(
    num_ahead: int, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard needs more than the limit of the disk, and each adapter is fetched once all the same."""
    fetched: list[str] = []

    def counted(url: str, versions: Any, options: Any, folder: Path, alike: Any) -> None:
        fetched.append(url)
        copied(url, versions, options, folder, alike)

    monkeypatch.setattr(adapters, "from_store", counted)

    async def story() -> None:
        served = [opened(number, f"{storage}-{number}") for number in range(6)]
        store = JobStore(str(tmp_path / "output"))
        cache = AdapterCache(FakePeers(), lambda: served, store, no_audit, {}, tmp_path, lambda: 15)  # type: ignore[arg-type]
        cache.foresee(AdapterFetch(each.sha256, None) for each in served[:num_ahead])
        await asyncio.sleep(0.3)
        found = await cache.get([each.sha256 for each in served], {})
        assert sorted(fetched) == [each.url for each in served]
        assert all(content(Path(each.folder)) == FILES for each in found.values())
        copies = cache.copies()
        assert copies.num_bytes == 60
        cache.release(found.values())
        assert copies.num_bytes <= 15
        cache.close()

    asyncio.run(story())


def test_the_first_of_many_adapters_do_not_wait_for_the_last(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def slow(url: str, versions: Any, options: Any, folder: Path, alike: Any) -> None:
        time.sleep(0.02)
        copied(url, versions, options, folder, alike)
        fetched.append(url)

    monkeypatch.setattr(adapters, "from_store", slow)

    async def story() -> None:
        served = [opened(number, f"{storage}-{number}") for number in range(100)]
        store = JobStore(str(tmp_path / "output"))
        cache = AdapterCache(FakePeers(), lambda: served, store, no_audit, {}, tmp_path)  # type: ignore[arg-type]
        pieces = cache.arriving([each.sha256 for each in served], {})
        found: set[str] = set()
        while not {each.sha256 for each in served[:8]} <= found:  # the first that were asked for
            found |= (await anext(pieces)).keys()
        assert len(found) < 80
        assert len(fetched) < 80
        await pieces.aclose()
        cache.close()

    asyncio.run(story())
