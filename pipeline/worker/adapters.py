"""`AdapterCache`: the adapters of one run on one worker, as local folders by content hash.

A local folder is used in place. An adapter in storage is read by the first worker that needs it; other workers get it
from that worker (LoRAServe's distributed pool, section 4), and from storage if it does not reply. The engine checks the
content hash, on the bytes that it loads.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...engine.errors import AdapterRefusedError
from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ...jobs.record import AdapterRecord
from ...jobs.storage.adapter_copy import adapter_folder
from ...jobs.storage.local_copy import is_remote
from ..migration.peers import FetchAdapter, PeerLostError, Peers

logger = logging.getLogger(__name__)
# Limit in seconds for a worker's reply. It is shorter than the wait for a hung worker, since storage has the adapter
# too.
_PEER_TIMEOUT_S = 10.0


class AdapterCache:
    """Fetches each adapter once for all shards and workers that ask for it. Used from the worker's event loop only.

    `read_adapters`: returns the job's adapters; it may read from storage, and is called until it succeeds once.
    `folder`: holds copies from other workers; its owner removes it.
    """

    def __init__(
        self,
        peers: Peers,
        read_adapters: Callable[[], Iterable[AdapterRecord]],
        storage_options: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self._peers = peers
        self._served = cache(lambda: {each.sha256: each for each in read_adapters() if not each.is_refused})
        self._storage_options = storage_options
        self._folder = folder
        # Content hash -> fetch that runs or has succeeded.
        self._fetches: dict[str, asyncio.Task[RegisterAdapter]] = {}

    async def get(self, adapter_ids: Iterable[str], peers: Mapping[str, str]) -> list[RegisterAdapter]:
        """The adapters in local folders. `peers`: content hash -> address of a worker that has the adapter.

        Raises `StorageError`, and KeyError for a content hash that is not the job's.
        """
        return [await self._get(adapter_id, peers.get(adapter_id)) for adapter_id in adapter_ids]

    async def files(self, adapter_id: str) -> dict[str, bytes]:
        """The files of an adapter by name, for another worker. Raises what `get` raises."""
        (adapter,) = await self.get([adapter_id], {})
        return await asyncio.to_thread(_read_files, Path(adapter.folder))

    async def _get(self, adapter_id: str, peer: str | None) -> RegisterAdapter:
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

    def _forget(self, adapter_id: str, fetch: asyncio.Task[RegisterAdapter]) -> None:
        """Drop a fetch that has failed, unless another fetch has taken its place."""
        if self._fetches.get(adapter_id) is fetch:
            del self._fetches[adapter_id]

    async def _fetch(self, adapter_id: str, peer: str | None) -> RegisterAdapter:
        served = await asyncio.to_thread(self._served)
        name, url = served[adapter_id].name, served[adapter_id].url
        folder = await self._copy_from(peer, adapter_id) if peer and is_remote(url) else None
        if folder is None:
            folder = await asyncio.to_thread(self._from_storage, url)
        return RegisterAdapter(adapter_id, str(folder), name)

    def _from_storage(self, url: str) -> Path:
        try:
            return adapter_folder(url, self._storage_options)
        except AdapterRefusedError as error:
            # It was read when the job began: its files have changed.
            raise StorageError(str(error)) from None

    async def _copy_from(self, peer: str, adapter_id: str) -> Path | None:
        """Folder with a copy of the adapter from another worker; None when the worker does not give it."""
        try:
            found = await self._peers.ask(peer, FetchAdapter(adapter_id), timeout_s=_PEER_TIMEOUT_S)
            return await asyncio.to_thread(_write_files, found.files, self._folder)
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
