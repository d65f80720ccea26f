"""`AdapterCache`: the adapters of one run on one worker, as local folders.

A local folder is used in place. An adapter in storage is read by the first worker that needs it; other workers get it
from that worker (LoRAServe's distributed pool, section 4), and from storage if it does not reply. Where the job was
opened by an adapter's header alone, the first worker that has its files also checks its values, in a confined process,
and keeps its content hash in the job's folder for all others. The engine checks the hash on the bytes that it loads.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ...engine.errors import AdapterRefusedError, curable
from ...engine.peft.audit import AdapterAudit
from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ...jobs.record import AdapterRecord, is_version_id
from ...jobs.storage.adapter_copy import adapter_folder
from ...jobs.storage.adapter_files import fetched_adapter
from ...jobs.storage.local_copy import is_remote
from ...jobs.store import AdapterContent, JobStore
from ...system.codec import MessageError
from ...system.confinement import ConfinedError
from ..migration.peers import FetchAdapter, PeerLostError, Peers

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Limit in seconds for a worker's reply. It is shorter than the wait for a hung worker, since storage has the adapter
# too.
_PEER_TIMEOUT_S = 10.0
# Adapters that are fetched at once, and how many of these may be ahead of the shards that need them.
_AT_ONCE, _AHEAD_AT_ONCE = 16, 8
# Adapters that are fetched and that no shard has asked for yet.
_MAX_AHEAD = 64


class AdapterCache:
    """Fetches each adapter once for all shards and workers that ask for it. Used from the worker's event loop only.

    `read_adapters`: returns the job's adapters; it may read from storage, and is called until it succeeds once.
    `store`: the job's, which keeps what was found about values. `audit`: audits an adapter of a name and folder with
    all its values. `folder`: holds copies from other workers; its owner removes it.
    """

    def __init__(
        self,
        peers: Peers,
        read_adapters: Callable[[], Iterable[AdapterRecord]],
        store: JobStore,
        audit: Callable[[str, Path], AdapterAudit],
        storage_options: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._peers = peers
        self._served = cache(lambda: {each.sha256: each for each in read_adapters() if not each.is_refused})
        self._store = store
        self._audit = audit
        self._storage_options = storage_options
        self._folder = folder
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="adapters")
        # Identity -> fetch that runs or has succeeded.
        self._fetches: dict[str, asyncio.Task[RegisterAdapter | str]] = {}
        # Adapters that will be needed, in order, and those of them that were fetched, or are, and not asked for yet.
        self._foreseen: deque[str] = deque()
        self._unasked: set[str] = set()
        self._num_ahead = 0

    async def get(self, adapter_ids: Iterable[str], peers: Mapping[str, str]) -> dict[str, RegisterAdapter | str]:
        """The adapters in local folders, by identity; a clause in place of one that cannot be used says why. `peers`:
        identity -> address of a worker that has the adapter.

        Raises `StorageError`, and KeyError for an identity that is not of the job.
        """
        ids = list(dict.fromkeys(adapter_ids))
        self._unasked.difference_update(ids)
        try:
            found = await asyncio.gather(*(self._get(adapter_id, peers.get(adapter_id)) for adapter_id in ids))
        finally:
            self._go_ahead()
        return dict(zip(ids, found, strict=True))

    def foresee(self, adapter_ids: Iterable[str]) -> None:
        """Fetch adapters ahead, in this order: at most `_MAX_AHEAD` that no shard has asked for yet."""
        self._foreseen = deque(adapter_ids)
        self._go_ahead()

    async def files(self, adapter_id: str) -> dict[str, bytes]:
        """The files of an adapter by name, for another worker. Raises what `get` raises, and `StorageError` for an
        adapter that cannot be used.
        """
        adapter = (await self.get([adapter_id], {}))[adapter_id]
        if isinstance(adapter, str):
            raise StorageError(adapter)
        return await self._in_thread(_read_files, Path(adapter.folder))

    def close(self) -> None:
        """Fetch nothing more."""
        self._foreseen.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _go_ahead(self) -> None:
        while self._foreseen and self._num_ahead < _AHEAD_AT_ONCE and len(self._unasked) < _MAX_AHEAD:
            adapter_id = self._foreseen.popleft()
            if adapter_id not in self._fetches:
                self._unasked.add(adapter_id)
                self._num_ahead += 1
                asyncio.ensure_future(self._get(adapter_id, None)).add_done_callback(self._went_ahead)

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
        served = await self._in_thread(self._served)
        adapter: AdapterRecord = served[adapter_id]
        folder: Path | str | None = None
        if peer and is_remote(adapter.url):
            folder = await self._copy_from(peer, adapter_id)
        if folder is None:
            folder = await self._in_thread(self._from_storage, adapter)
        if isinstance(folder, str):
            return folder
        sha256 = ""
        if is_version_id(adapter_id):
            sha256, reasons = await self._in_thread(self._learn, adapter, folder)
            if reasons:
                return f"refused. {' '.join(reasons)}"
        return RegisterAdapter(adapter_id, str(folder), adapter.name, sha256)

    def _from_storage(self, adapter: AdapterRecord) -> Path | str:
        """The adapter's folder; a clause where its files are not those with which the job was opened."""
        try:
            if adapter.files:
                return fetched_adapter(adapter.url, adapter.files, self._storage_options)
            return adapter_folder(adapter.url, self._storage_options)
        except AdapterRefusedError as error:
            if adapter.files:
                return curable(error)
            # It was read when the job began: its files have changed.
            raise StorageError(str(error)) from None

    def _learn(self, adapter: AdapterRecord, folder: Path) -> AdapterContent:
        """Content hash of an adapter of which the job knows the header, and reasons against its values. Who reads them
        first decides for all.
        """
        known = self._store.adapter_content(adapter.sha256)
        if known is not None:
            return known
        try:
            found = self._audit(adapter.name, folder)
        except (ConfinedError, MessageError) as error:
            # Not for all workers: the child may have been ended with this one.
            return "", (curable(f"cannot be audited: {error}"),)
        if found.verdict != "refused" and found.identity_sha256:
            return self._store.learn_adapter(adapter.sha256, found.identity_sha256)
        prefix = f"adapter {adapter.name!r}: "
        return self._store.learn_adapter(adapter.sha256, "", [why.removeprefix(prefix) for why in found.reasons])

    async def _copy_from(self, peer: str, adapter_id: str) -> Path | None:
        """Folder with a copy of the adapter from another worker; None when the worker does not give it."""
        try:
            found = await self._peers.ask(peer, FetchAdapter(adapter_id), timeout_s=_PEER_TIMEOUT_S)
            return await self._in_thread(_write_files, found.files, self._folder)
        except (PeerLostError, ValueError) as error:
            logger.warning("adapter %s is fetched from storage: %s", adapter_id[:12], error)
            return None


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write files to a new folder below `folder`. Raises ValueError for names that are no plain file names."""
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no file name")
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name, content in files.items():
        (copy / name).write_bytes(content)
    return copy
