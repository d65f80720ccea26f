"""Adapters of a job on one worker: fetched once, from another worker or storage, and no file where none belongs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.pipeline.migration.peers import AdapterFiles, FetchAdapter, PeerLostError, PeerRequest
from lorabatch.pipeline.worker.adapters import AdapterCache

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x00weights"}
FAR = "s3://no-such-bucket/alpha"
ALPHA = "sha-alpha"
PEER = "tcp://peer"


class Peer:
    """Another worker: replies with `files` once it may, or is lost (None)."""

    def __init__(self, files: Mapping[str, bytes] | None = FILES) -> None:
        self.files = files
        self.asked: list[object] = []
        self.may_reply = asyncio.Event()
        self.may_reply.set()

    async def ask(self, address: str, request: PeerRequest[AdapterFiles], timeout_s: float) -> AdapterFiles:
        self.asked.append(request)
        await self.may_reply.wait()
        if self.files is None:
            raise PeerLostError(f"{address} does not answer")
        return AdapterFiles(self.files)


def record(name: str, url: str, verdict: str = "exact") -> AdapterRecord:
    return AdapterRecord.model_validate({"name": name, "url": url, "verdict": verdict, "sha256": f"sha-{name}"})


def cache_of(folder: Path, *adapters: AdapterRecord, peer: Peer | None = None) -> AdapterCache:
    return AdapterCache(adapters, {}, folder / "copies", peer or Peer())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def alpha(tmp_path: Path) -> Path:
    folder = tmp_path / "alpha"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_local_adapter_stays_where_it_is_and_is_never_far(alpha: Path, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, record("alpha", str(alpha)), record("beta", f"file://{alpha}"))
    assert not any(map(cache.is_far, [ALPHA, "sha-beta"]))
    (found,) = cache.local([cache.id_of("alpha")])
    assert (found.folder, found.source.name) == (alpha, "alpha")
    assert not (tmp_path / "copies").exists()


def test_a_remote_adapter_is_far_until_another_worker_has_given_it_once(tmp_path: Path) -> None:
    peer = Peer()
    cache = cache_of(tmp_path, record("alpha", FAR), peer=peer)

    async def story() -> None:
        assert cache.is_far(ALPHA)
        peer.may_reply.clear()
        waiting = [asyncio.create_task(cache.take_over({ALPHA: PEER})) for _ in range(3)]
        serving = asyncio.create_task(cache.files(ALPHA))
        while not peer.asked:
            await asyncio.sleep(0)
        assert cache.is_far(ALPHA)
        waiting[1].cancel()
        peer.may_reply.set()
        ((first,), (third,)) = await asyncio.gather(waiting[0], waiting[2])
        assert not cache.is_far(ALPHA)
        assert first == third
        assert content(first.folder) == await serving == FILES

    asyncio.run(story())
    assert peer.asked == [FetchAdapter(ALPHA)]


def test_an_adapter_is_fetched_to_be_passed_on(alpha: Path, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, record("alpha", str(alpha)))
    assert asyncio.run(cache.files(ALPHA)) == FILES
    with pytest.raises(KeyError):
        asyncio.run(cache.files("sha-of-another-job"))


def test_a_thread_waits_for_an_adapter_that_is_under_way(tmp_path: Path) -> None:
    peer = Peer()
    cache = cache_of(tmp_path, record("alpha", FAR), peer=peer)

    async def story() -> None:
        peer.may_reply.clear()
        taking = asyncio.create_task(cache.take_over({ALPHA: PEER}))
        while not peer.asked:
            await asyncio.sleep(0)
        with ThreadPoolExecutor(1) as pool:
            needed = pool.submit(cache.local, [ALPHA])
            peer.may_reply.set()
            assert await asyncio.wrap_future(needed) == await taking

    asyncio.run(story())


def test_an_adapter_that_the_peer_does_not_give_is_fetched_from_storage_by_each_that_waited(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, record("alpha", FAR), peer=Peer(None))

    async def story() -> None:
        taking = [cache.take_over({ALPHA: PEER}) for _ in range(2)]
        errors = await asyncio.gather(*taking, return_exceptions=True)
        assert all(isinstance(error, StorageError) for error in errors)
        assert cache.is_far(ALPHA)

    asyncio.run(story())


@pytest.mark.parametrize("name", ["../outside", "a/b", "/etc/passwd", "..", ".", ""])
def test_a_copy_whose_file_names_lead_elsewhere_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, record("alpha", FAR), peer=Peer({"adapter_config.json": b"{}", name: b"x"}))
    with pytest.raises(StorageError):
        asyncio.run(cache.take_over({ALPHA: PEER}))
    assert not (tmp_path / "copies").exists()
    assert cache.is_far(ALPHA)


def test_refused_adapters_have_no_place_and_missing_ones_say_so(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, record("broken", "/nowhere", "refused"), record("gone", str(tmp_path / "gone")))
    with pytest.raises(KeyError):
        cache.local(["sha-broken"])
    with pytest.raises(StorageError, match="gone"):
        cache.local(["sha-gone"])
