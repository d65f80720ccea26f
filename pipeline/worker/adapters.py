"""`AdapterCache`: the adapters of one run on one worker, as local folders.

A local folder is used in place. An adapter in storage is read by the first worker that needs it; other workers get it
from one that has it (LoRAServe's distributed pool, section 4; `adapter_peers.py`), and from storage if that one does
not reply, is slower, or waits for this worker to have it. Where the job was opened by an adapter's header alone, the
first worker that has its files also checks its values, in a confined process, and keeps its content hash in the job's
folder for all others. The engine checks the hash on the bytes that it loads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ...engine.adapter_use import AdapterUse
from ...engine.errors import AdapterRefusedError, curable
from ...engine.peft.audit import AdapterAudit
from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ...jobs.record import AdapterRecord, is_version_id
from ...jobs.storage.adapter_copies import AdapterCopies
from ...jobs.storage.adapter_copy import adapter_folder
from ...jobs.storage.adapter_files import Alike, fetched_adapter, from_store, is_whole
from ...jobs.storage.local_copy import is_remote
from ...jobs.store import AdapterContent, JobStore
from ...scheduler.messages import AdapterFetch
from ...system.codec import MessageError
from ...system.confinement import ConfinedError
from ..migration.peers import AdapterFiles, FetchAdapter, PeerLostError, Peers
from .adapter_peers import AdapterPeers, heard

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Factor by which a store must be faster than other workers to be asked first.
_MUCH_FASTER = 2.0
# Adapters that are fetched at once, how many of these may be ahead of the shards that need them, and how many other
# workers may be asked for: the rest can be read from storage, for workers that ask for them.
_AT_ONCE, _AHEAD_AT_ONCE, _ASKED_AT_ONCE = 16, 8, 8
# Threads beside those of fetches.
_OTHER_THREADS = 4
# Most adapters that are fetched and that no shard has asked for yet, and their largest share of the limit of disk,
# which is that of all workers of a host.
_MAX_AHEAD, _AHEAD_SHARE = 64, 0.25
# Most folders that are held for shards that have not taken them: a shard may have ended before.
_MAX_KEPT = 128
_LOOP_CHECK_S = 1.0
# Seconds after the first of several adapters in which others may come with it: rows of many adapters fill a batch
# better than those of one.
_GATHER_S = 0.05
# Beginning of clauses that hold for good.
_REFUSED = "refused. "


class AdapterCache:
    """Fetches each adapter once for all shards and workers that ask for it. Used from the worker's event loop only.

    `read_adapters`: returns the job's adapters; it may read from storage, and is called until it succeeds once.
    `store`: the job's, which keeps what was found about values. `audit`: audits an adapter of a name and folder with
    all its values. `folder`: holds other workers' copies of adapters without versions; its owner removes it.
    `disk_bytes`: returns the limit of `AdapterCopies`.
    """

    def __init__(
        self,
        peers: Peers,
        read_adapters: Callable[[], Iterable[AdapterRecord]],
        store: JobStore,
        audit: Callable[[str, Path], AdapterAudit],
        storage_options: Mapping[str, Any],
        folder: Path,
        disk_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._served = cache(lambda: {each.sha256: each for each in read_adapters() if not each.is_refused})
        self._store = store
        self._audit = audit
        self._storage_options = storage_options
        self._folder = folder
        self._disk_bytes = disk_bytes
        self._copies: AdapterCopies | None = None
        self._lock = threading.Lock()
        # More threads than fetches: what has come must not wait behind what is to come.
        self._threads = ThreadPoolExecutor(_AT_ONCE + _OTHER_THREADS, thread_name_prefix="adapters")
        self._may_fetch = asyncio.Semaphore(_AT_ONCE)
        # Identity -> fetch that runs or has succeeded.
        self._fetches: dict[str, asyncio.Task[RegisterAdapter | str]] = {}
        # Adapters that were fetched and that no shard has taken yet -> their folders, which are held for the first that
        # does: without that, they could be removed before, to make room.
        self._kept: dict[str, Path] = {}
        # Adapters that will be needed, in order, and those of them that were fetched, or are, and not asked for yet.
        self._foreseen: deque[AdapterFetch] = deque()
        self._unasked: set[str] = set()
        self._num_ahead = 0
        self._others = AdapterPeers(peers, lambda: self.copies().identity)
        self._may_ask = asyncio.Semaphore(_ASKED_AT_ONCE)
        # Bytes per second of the last fetches from workers and from storage; 0 without any.
        self._pace = {"peer": 0.0, "store": 0.0}
        self._alike = Alike()
        self._use = AdapterUse()
        self._fetched_bytes = 0

    async def get(self, adapter_ids: Iterable[str], peers: Mapping[str, str]) -> dict[str, RegisterAdapter | str]:
        """The adapters in local folders, by identity; a clause in place of one that cannot be used says why. `peers`:
        identity -> address of a worker that has the adapter. The folders stay until they are released.

        Raises `StorageError`, and KeyError for an identity that is not of the job.
        """
        found: dict[str, RegisterAdapter | str] = {}
        try:
            async for come in self.arriving(adapter_ids, peers):
                found |= come
        except BaseException:
            self.release(found.values())
            raise
        return found

    async def arriving(
        self, adapter_ids: Iterable[str], peers: Mapping[str, str]
    ) -> AsyncGenerator[dict[str, RegisterAdapter | str]]:
        """The adapters of `get` in pieces, each with those that have come since the last. Raises what `get` raises; the
        caller releases what it got before.
        """
        ids = list(dict.fromkeys(adapter_ids))
        self._unasked.difference_update(ids)
        gets: dict[asyncio.Task[RegisterAdapter | str], str] = {}

        def begin(adapter_id: str) -> None:
            get = asyncio.create_task(self._get(adapter_id, peers.get(adapter_id)))
            get.add_done_callback(heard)
            gets[get] = adapter_id

        for adapter_id in ids:
            begin(adapter_id)
        try:
            while gets:
                await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
                done, _ = await asyncio.wait(gets, timeout=_GATHER_S)
                come = {gets.pop(get): get.result() for get in done}
                gone = await self._take(come)
                found: dict[str, RegisterAdapter | str] = {}
                for adapter_id, adapter in come.items():
                    is_gone = not isinstance(adapter, str) and Path(adapter.folder) in gone
                    if not is_gone:
                        found[adapter_id] = adapter
                    # removed, to make room, before it was held; or for a reason that may pass
                    if is_gone or (isinstance(adapter, str) and not adapter.startswith(_REFUSED)):
                        self._fetches.pop(adapter_id, None)
                    if is_gone:
                        begin(adapter_id)
                if found:
                    yield found
        finally:
            for get in gets:
                get.cancel()
            self._go_ahead()

    def release(self, adapters: Iterable[RegisterAdapter | str]) -> None:
        """Let folders go that `get` has returned: their room may be needed. Any thread may call."""
        self._release(Path(each.folder) for each in adapters if not isinstance(each, str))

    def foresee(self, fetches: Iterable[AdapterFetch]) -> None:
        """Fetch adapters ahead, in this order: at most `_MAX_AHEAD` that no shard has asked for yet."""
        self._foreseen = deque(fetches)
        self._go_ahead()

    async def reply(self, request: FetchAdapter) -> AdapterFiles:
        """The reply to another worker. Raises what `AdapterPeers.reply` raises."""

        async def get() -> RegisterAdapter | str:
            adapter = await self._get(request.adapter_id, None)
            if request.adapter_id in self._kept and request.adapter_id not in self._unasked:
                kept = self._kept.pop(request.adapter_id)
                await asyncio.to_thread(self._release, [kept], is_done=False)
            return adapter

        return await self._others.reply(request, get)

    @property
    def use(self) -> AdapterUse:
        """Fetches so far of adapters whose files have versions. Any thread may ask."""
        return self._use

    @property
    def copies_bytes(self) -> int:
        """Bytes of all copies on this host; 0 before this process has fetched any. Any thread may ask."""
        return 0 if self._copies is None else self._copies.num_bytes

    def close(self) -> None:
        """Fetch nothing more, and let all folders go."""
        self._foreseen.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._copies is not None:
            self._copies.close()

    def copies(self) -> AdapterCopies:
        """The copies of adapters on this host. Any thread may call."""
        limit_bytes = self._disk_bytes()
        with self._lock:
            if self._copies is None:
                self._copies = AdapterCopies(limit_bytes=limit_bytes)
            return self._copies

    def _release(self, folders: Iterable[Path], *, is_done: bool = True) -> None:
        if self._copies is not None:
            self._copies.release(folders, is_done=is_done)

    def _hold(self, adapters: Iterable[RegisterAdapter | str], kept: Collection[Path]) -> list[Path]:
        """Hold folders; `kept` were held for them. Returns those that are gone."""
        folders = [Path(each.folder) for each in adapters if not isinstance(each, str)]
        gone = [] if self._copies is None else self._copies.hold(folders)
        if kept:
            self._release(kept, is_done=False)
        return gone

    async def _take(self, adapters: Mapping[str, RegisterAdapter | str]) -> list[Path]:
        """Hold the folders of adapters, so that they stay until they are released. Returns those that are gone."""
        kept = [self._kept.pop(adapter_id) for adapter_id in adapters if adapter_id in self._kept]
        holding = asyncio.ensure_future(self._in_thread(self._hold, adapters.values(), kept))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            await holding
            await asyncio.to_thread(self.release, adapters.values())
            raise

    async def _keep(self, adapter_id: str, folder: Path) -> None:
        """Leave a folder that is held to the first shard that takes it; the oldest go that none has taken."""
        self._kept[adapter_id] = folder
        surplus = list(self._kept)[: max(0, len(self._kept) - _MAX_KEPT)]
        await asyncio.to_thread(self._release, [self._kept.pop(each) for each in surplus], is_done=False)

    @property
    def _most_ahead(self) -> int:
        """Adapters that may be fetched ahead: as many as a share of the limit of disk holds, or the first would be
        removed again for the last.
        """
        num_fetched = self._use.peer_fetches + self._use.storage_fetches
        if self._copies is None or not num_fetched:
            return _MAX_AHEAD
        mean_bytes = self._fetched_bytes / num_fetched
        return min(_MAX_AHEAD, int(_AHEAD_SHARE * self._copies.limit_bytes / max(mean_bytes, 1)))

    def _go_ahead(self) -> None:
        while self._foreseen and self._num_ahead < _AHEAD_AT_ONCE and len(self._unasked) < self._most_ahead:
            fetch = self._foreseen.popleft()
            if fetch.adapter_id not in self._fetches:
                self._unasked.add(fetch.adapter_id)
                self._num_ahead += 1
                going = asyncio.ensure_future(self._get(fetch.adapter_id, fetch.from_replica_id))
                going.add_done_callback(self._went_ahead)

    def _went_ahead(self, fetch: asyncio.Future[RegisterAdapter | str]) -> None:
        self._num_ahead -= 1
        if not fetch.cancelled() and (error := fetch.exception()) is not None:
            logger.info("an adapter was not fetched ahead: %s", error)  # the shard that needs it fetches it
        self._go_ahead()

    async def _get(self, adapter_id: str, peer: str | None) -> RegisterAdapter | str:
        """Wait for the fetch that runs. If it fails, fetch again, since this caller may know another worker."""
        while adapter_id in self._fetches:
            fetch = self._fetches[adapter_id]
            try:
                return await asyncio.shield(fetch)
            except StorageError:
                self._forget(adapter_id, fetch)
        fetch = self._fetches[adapter_id] = asyncio.create_task(self._fetch(adapter_id, peer))
        try:
            return await asyncio.shield(fetch)
        except Exception:
            self._forget(adapter_id, fetch)
            raise

    def _forget(self, adapter_id: str, fetch: asyncio.Task[RegisterAdapter | str]) -> None:
        """Drop a fetch that has failed, unless another fetch has taken its place."""
        if self._fetches.get(adapter_id) is fetch:
            del self._fetches[adapter_id]

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))

    async def _fetch(self, adapter_id: str, peer: str | None) -> RegisterAdapter | str:
        """Fetch an adapter when it is its turn."""
        served = await self._in_thread(self._served)
        adapter: AdapterRecord = served[adapter_id]
        if not is_remote(adapter.url) or self._pace["store"] > _MUCH_FASTER * self._pace["peer"] > 0:
            peer = None
        if not adapter.files:
            return await self._fetch_now(adapter, adapter_id, peer)
        if peer in self._others.sharing:
            peer = None
        async with self._may_ask if peer else nullcontext(), self._may_fetch:
            # what is known of the worker now, and not when the adapter began to wait
            return await self._fetch_now(adapter, adapter_id, None if peer in self._others.sharing else peer)

    async def _fetch_now(self, adapter: AdapterRecord, adapter_id: str, peer: str | None) -> RegisterAdapter | str:
        folder: Path | str | None = None
        if adapter.files:
            loop = asyncio.get_running_loop()
            folder = await self._in_thread(self._copied, adapter, peer, loop)
        elif peer:
            folder = await self._copy_apart(peer, adapter_id)
        if folder is None:
            folder = await self._in_thread(self._whole, adapter)
        if isinstance(folder, str):
            return folder
        why: str | None = "the fetch has failed"
        try:
            sha256, why = await self._in_thread(self._checked, adapter_id, adapter, folder)
        finally:
            if why is None and adapter.files:
                await self._keep(adapter_id, folder)
            else:
                await asyncio.to_thread(self._release, [folder], is_done=False)
        return why or RegisterAdapter(adapter_id, str(folder), adapter.name, sha256)

    def _whole(self, adapter: AdapterRecord) -> Path:
        """The folder of an adapter without versions, which is copied with all that it holds."""
        try:
            return adapter_folder(adapter.url, self._storage_options)
        except AdapterRefusedError as error:
            # It was read when the job began: its files have changed.
            raise StorageError(str(error)) from None

    def _copied(self, adapter: AdapterRecord, peer: str | None, loop: asyncio.AbstractEventLoop) -> Path | str:
        """The folder of an adapter whose files have versions, which is held; a clause where they have others now, or
        the disk has no room for it.
        """

        def fetch(folder: Path) -> None:
            began_s = time.monotonic()
            if peer is not None:
                try:
                    _wait(self._others.copy(peer, adapter.sha256, folder, adapter.files), loop)
                    self._note("peer", folder, began_s)
                    return
                except (PeerLostError, ValueError) as error:
                    if peer not in self._others.sharing:
                        logger.warning("adapter %s is fetched from storage: %s", adapter.name, error)
                    for path in folder.iterdir():
                        path.unlink()
            from_store(adapter.url, adapter.files, self._storage_options, folder, self._alike)
            self._note("store", folder, began_s)

        try:
            return fetched_adapter(adapter.url, adapter.files, self.copies(), fetch)
        except AdapterRefusedError as error:
            return curable(error)
        except OSError as error:
            place = self.copies().root
            return curable(f"no room for its files in {place} ({error.strerror}). Free some space there")

    def _note(self, source: str, folder: Path, began_s: float) -> None:
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        seconds = time.monotonic() - began_s
        is_peer = source == "peer"
        use = AdapterUse(peer_fetches=int(is_peer), storage_fetches=int(not is_peer), fetch_s=seconds)
        with self._lock:
            self._pace[source] = num_bytes / max(seconds, 1e-3)
            self._use += use
            self._fetched_bytes += num_bytes

    def _checked(self, adapter_id: str, adapter: AdapterRecord, folder: Path) -> tuple[str, str | None]:
        """Content hash of an adapter of which the job knows the header, "" for others; and a clause that says why it
        cannot be used, None if it can.
        """
        if not is_version_id(adapter_id):
            return "", None
        try:
            sha256, reasons = self._learn(adapter, folder)
        except AdapterRefusedError as error:
            return "", curable(error)
        return sha256, f"{_REFUSED}{' '.join(reasons)}" if reasons else None

    def _learn(self, adapter: AdapterRecord, folder: Path) -> AdapterContent:
        """Content hash of an adapter of which the job knows the header, and reasons against its values. Who reads them
        first decides for all. Raises `AdapterRefusedError` where the child process breaks a limit or is ended.
        """
        known = self._store.adapter_content(adapter.sha256)
        if known is not None:
            return known
        try:
            found = self._audit(adapter.name, folder)
        except (ConfinedError, MessageError) as error:
            # Not for all workers: the child may have been ended with this one.
            raise AdapterRefusedError(f"cannot be audited: {error}") from None
        if found.verdict != "refused" and found.identity_sha256:
            return self._store.learn_adapter(adapter.sha256, found.identity_sha256)
        if not is_whole(folder, adapter.files):
            raise AdapterRefusedError(f"its copy in {folder} was changed while it was read")
        prefix = f"adapter {adapter.name!r}: "
        return self._store.learn_adapter(adapter.sha256, "", [why.removeprefix(prefix) for why in found.reasons])

    async def _copy_apart(self, peer: str, adapter_id: str) -> Path | None:
        """A new folder with a copy from another worker; None when the worker does not give it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            await self._others.copy(peer, adapter_id, folder)
        except (PeerLostError, ValueError) as error:
            logger.warning("adapter %s is fetched from storage: %s", adapter_id[:12], error)
            shutil.rmtree(folder)
            return None
        return folder


def _wait(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Wait in a thread until a coroutine is done in the event loop. Raises what it raises, and `PeerLostError` when the
    loop ends first.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    while True:
        try:
            return future.result(_LOOP_CHECK_S)
        except TimeoutError:
            if future.done():
                raise
            if not loop.is_running():
                raise PeerLostError("the worker ends") from None
