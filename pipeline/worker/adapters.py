"""Adapters of one job as local folders on one worker: found once, and taken from another worker before storage.

Brings adapters to this worker from another one before storage is asked, and passes them on.

An adapter is read from storage by the first worker that needs it; the others get it from there (LoRAServe's
distributed pool).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...jobs.record import AdapterRecord
from ...jobs.storage.local_copy import local_folder
from ..messages import AdapterSource, LocalAdapter
from ..migration.peers import FetchAdapter, PeerLostError, Peers

logger = logging.getLogger(__name__)


class AdapterShelf:
    """What is there already, by content hash. `folder`: where copies from other workers go. Any thread may ask.

    Whoever asks for an adapter that somebody else is bringing waits for that one, and brings it himself if it does not
    come.
    """

    def __init__(self, adapters: Iterable[AdapterRecord], storage_options: Mapping[str, Any], folder: Path) -> None:
        served = [adapter for adapter in adapters if not adapter.is_refused]
        self._sources = {a.sha256: AdapterSource(a.sha256, a.name, a.url) for a in served}
        self._id_of = {adapter.name: adapter.sha256 for adapter in served}
        self._storage_options = storage_options
        self._folder = folder
        self._found: dict[str, LocalAdapter] = {}
        self._coming: set[str] = set()
        self._changed = threading.Condition()

    def id_of(self, name: str) -> str:
        """The content hash of an adapter."""
        return self._id_of[name]

    def local(self, adapter_ids: Iterable[str]) -> list[LocalAdapter]:
        """The adapters in local folders; fetched from storage if they lie there. Raises `StorageError`."""
        return [self._local(adapter_id) for adapter_id in adapter_ids]

    def _local(self, adapter_id: str) -> LocalAdapter:
        while True:
            with self.bringing(adapter_id) as is_ours:
                if is_ours:
                    source = self._sources[adapter_id]
                    self._keep(LocalAdapter(source, local_folder(source.url, self._storage_options)))
            with self._changed:
                self._changed.wait_for(lambda: adapter_id not in self._coming)
                if adapter_id in self._found:
                    return self._found[adapter_id]

    def is_far(self, adapter_id: str) -> bool:
        """Whether it would have to be fetched from storage: it lies there, and nobody has brought it yet."""
        with self._changed:
            return adapter_id not in self._found and is_remote(self._sources[adapter_id].url)

    def is_coming(self, adapter_id: str) -> bool:
        """Whether somebody is bringing it."""
        with self._changed:
            return adapter_id in self._coming

    @contextmanager
    def bringing(self, adapter_id: str) -> Iterator[bool]:
        """Whether it is for the caller to bring an adapter within this block: it is neither here nor on its way."""
        with self._changed:
            is_ours = adapter_id not in self._found and adapter_id not in self._coming
            if is_ours:
                self._coming.add(adapter_id)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._changed:
                    self._coming.discard(adapter_id)
                    self._changed.notify_all()

    def files(self, adapter_id: str) -> dict[str, bytes]:
        """The files of an adapter by name, for another worker; it is fetched from storage if need be. Raises KeyError
        for one that is not the job's, `StorageError`.
        """
        folder = self._local(adapter_id).folder
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}

    def put(self, adapter_id: str, files: Mapping[str, bytes]) -> None:
        """Keep a copy that another worker sent. Raises ValueError for names that are no plain file names."""
        for name in files:
            if Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"{name!r} is no file name")
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=self._folder))
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        self._keep(LocalAdapter(self._sources[adapter_id], scratch))

    def _keep(self, adapter: LocalAdapter) -> None:
        with self._changed:
            self._found.setdefault(adapter.source.adapter_id, adapter)


def is_remote(url: str) -> bool:
    """Whether what lies there must be fetched before it can be read."""
    return "://" in url and not url.startswith("file://")


# Storage is always there instead. Less than a hung worker is given.
_ADAPTER_TIMEOUT_S = 10.0
_SETTLE_POLL_S = 0.02


class AdapterSupply:
    """Used from the worker's event loop only. `find_shelf` may read from storage on its first call."""

    def __init__(self, peers: Peers, find_shelf: Callable[[], AdapterShelf]) -> None:
        self._peers = peers
        self._find_shelf = find_shelf

    async def take_over(self, sources: Mapping[str, str]) -> list[LocalAdapter]:
        """Adapters in local folders, `sources`: by content hash, with a worker each that has it. Storage is asked for
        those that lie there and that the worker does not give. Raises `StorageError`.
        """
        shelf = await asyncio.to_thread(self._find_shelf)
        for adapter_id, source in sources.items():
            if shelf.is_far(adapter_id):
                await self._take_over(shelf, adapter_id, source)
        return await asyncio.to_thread(shelf.local, sources)

    async def files(self, adapter_id: str) -> dict[str, bytes]:
        """An adapter for another worker; see `AdapterShelf.files`."""
        shelf = await asyncio.to_thread(self._find_shelf)
        await _settle(shelf, adapter_id)
        return await asyncio.to_thread(shelf.files, adapter_id)

    async def _take_over(self, shelf: AdapterShelf, adapter_id: str, source: str) -> None:
        with shelf.bringing(adapter_id) as is_ours:
            if is_ours:
                await self._bring(shelf, adapter_id, source)
        await _settle(shelf, adapter_id)

    async def _bring(self, shelf: AdapterShelf, adapter_id: str, source: str) -> None:
        try:
            found = await self._peers.ask(source, FetchAdapter(adapter_id), timeout_s=_ADAPTER_TIMEOUT_S)
            await asyncio.to_thread(shelf.put, adapter_id, found.files)
        except (PeerLostError, ValueError) as error:
            logger.warning("adapter %s comes from storage: %s", adapter_id[:12], error)


async def _settle(shelf: AdapterShelf, adapter_id: str) -> None:
    """Wait here, and not in one of the few threads that bring adapters, until one on its way has come."""
    while shelf.is_coming(adapter_id):
        await asyncio.sleep(_SETTLE_POLL_S)
