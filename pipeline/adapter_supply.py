"""Brings adapters to this worker from another one before storage is asked, and passes them on.

An adapter is read from storage by the first worker that needs it; the others get it from there (LoRAServe's
distributed pool).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from .adapter_shelf import AdapterShelf
from .messages import LocalAdapter
from .peers import PeerLostError, Peers

logger = logging.getLogger(__name__)

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
            answer = await self._peers.ask(source, "adapter", timeout_s=_ADAPTER_TIMEOUT_S, adapter_id=adapter_id)
            await asyncio.to_thread(shelf.put, adapter_id, answer["files"])
        except (PeerLostError, ValueError) as error:
            logger.warning("adapter %s comes from storage: %s", adapter_id[:12], error)


async def _settle(shelf: AdapterShelf, adapter_id: str) -> None:
    """Wait here, and not in one of the few threads that bring adapters, until one on its way has come."""
    while shelf.is_coming(adapter_id):
        await asyncio.sleep(_SETTLE_POLL_S)
