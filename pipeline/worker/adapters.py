"""`AdapterCache`: the adapters of one job as local folders on one worker, each fetched once.

An adapter is read from storage by the first worker that needs it; the others get it from there (LoRAServe's
distributed pool).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ...jobs.record import AdapterRecord
from ...jobs.storage.local_copy import local_folder
from ..messages import AdapterSource, LocalAdapter
from ..migration.peers import AdapterFiles, FetchAdapter, PeerLostError, PeerRequest

logger = logging.getLogger(__name__)
# Less than a hung worker is given: storage is there instead.
_PEER_TIMEOUT_S = 10.0


class _AsksPeers(Protocol):
    async def ask(self, address: str, request: PeerRequest[AdapterFiles], timeout_s: float) -> AdapterFiles:
        """See `Peers.ask`."""


class AdapterCache:
    """Adapters by content hash. `folder`: for copies from other workers, which `peers` reaches.

    A caller that needs an adapter which another one is fetching waits for that one, and fetches it itself if the other
    fails. Methods are for any thread; coroutines are for the worker's event loop.
    """

    def __init__(
        self, adapters: Iterable[AdapterRecord], storage_options: Mapping[str, Any], folder: Path, peers: _AsksPeers
    ) -> None:
        served = [adapter for adapter in adapters if not adapter.is_refused]
        self._sources = {a.sha256: AdapterSource(a.sha256, a.name, a.url) for a in served}
        self._id_of = {adapter.name: adapter.sha256 for adapter in served}
        self._storage_options = storage_options
        self._folder = folder
        self._peers = peers
        self._lock = threading.Lock()
        # Done with the adapter, under way, or done with None where a fetch has failed just now.
        self._fetches: dict[str, Future[LocalAdapter | None]] = {}

    def id_of(self, name: str) -> str:
        """The content hash of an adapter."""
        return self._id_of[name]

    def local(self, adapter_ids: Iterable[str]) -> list[LocalAdapter]:
        """The adapters in local folders, remote ones fetched from storage. Raises KeyError for one that is not the
        job's, `StorageError`.
        """
        return [self._local(adapter_id) for adapter_id in adapter_ids]

    def is_far(self, adapter_id: str) -> bool:
        """Whether it would have to be fetched from storage."""
        fetch = self._fetches.get(adapter_id)
        return (fetch is None or not fetch.done()) and is_remote(self._sources[adapter_id].url)

    async def take_over(self, workers: Mapping[str, str]) -> list[LocalAdapter]:
        """Adapters in local folders, remote ones from a worker that has them if it replies. `workers`: by adapter.

        Raises `StorageError`.
        """
        for adapter_id, worker in workers.items():
            if self.is_far(adapter_id):
                with self._fetching(adapter_id) as (fetch, is_ours):
                    if is_ours:
                        await self._ask_peer(adapter_id, worker, fetch)
                await asyncio.wrap_future(fetch)
        return await asyncio.to_thread(self.local, workers)

    async def files(self, adapter_id: str) -> dict[str, bytes]:
        """The files of an adapter by name, for another worker. Raises KeyError for an adapter that is not the job's,
        `StorageError`.
        """
        fetch = self._fetches.get(adapter_id)
        if fetch is not None:
            # Not in one of the few threads of the event loop, which may all be needed for fetches.
            await asyncio.wrap_future(fetch)
        return await asyncio.to_thread(self._read_files, adapter_id)

    def _read_files(self, adapter_id: str) -> dict[str, bytes]:
        folder = self._local(adapter_id).folder
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}

    def _local(self, adapter_id: str) -> LocalAdapter:
        while True:
            with self._fetching(adapter_id) as (fetch, is_ours):
                if is_ours:
                    source = self._sources[adapter_id]
                    fetch.set_result(LocalAdapter(source, local_folder(source.url, self._storage_options)))
            adapter = fetch.result()
            if adapter is not None:
                return adapter

    @contextmanager
    def _fetching(self, adapter_id: str) -> Iterator[tuple[Future[LocalAdapter | None], bool]]:
        """The fetch of an adapter, and whether the caller has to set its result within this block. Without a result the
        next caller tries.
        """
        with self._lock:
            is_ours = adapter_id not in self._fetches
            fetch = self._fetches.setdefault(adapter_id, Future())
        if is_ours:
            # Otherwise a waiting coroutine that is cancelled would cancel the fetch for all.
            fetch.set_running_or_notify_cancel()
        try:
            yield fetch, is_ours
        finally:
            if is_ours and not fetch.done():
                with self._lock:
                    del self._fetches[adapter_id]
                fetch.set_result(None)

    async def _ask_peer(self, adapter_id: str, worker: str, fetch: Future[LocalAdapter | None]) -> None:
        try:
            found = await self._peers.ask(worker, FetchAdapter(adapter_id), timeout_s=_PEER_TIMEOUT_S)
            folder = await asyncio.to_thread(_write_files, self._folder, found.files)
            fetch.set_result(LocalAdapter(self._sources[adapter_id], folder))
        except (PeerLostError, ValueError) as error:
            logger.warning("adapter %s is fetched from storage: %s", adapter_id[:12], error)


def _write_files(parent: Path, files: Mapping[str, bytes]) -> Path:
    """A new folder in `parent` with these files. Raises ValueError for names that are no plain file names."""
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no file name")
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def is_remote(url: str) -> bool:
    """Whether what is stored there must be fetched before it can be read."""
    return "://" in url and not url.startswith("file://")
