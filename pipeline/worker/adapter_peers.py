"""`AdapterPeers`: adapters that one worker gets from others and gives to others, file by file in pieces.

A worker that asks names all that wait for its reply, itself included, so that no two workers wait for each other.
Workers that share copies find that out by the first request, and do not give each other these.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from ...engine.server.frames import RegisterAdapter
from ...jobs.errors import StorageError
from ..migration.peers import AdapterFiles, FetchAdapter, PeerLostError, Peers

# Bytes of a piece of a file between workers, and the seconds that one may take: a transfer has no other limit.
_PIECE_BYTES = 4 << 20
_PIECE_TIMEOUT_S = 10.0
# Seconds that a worker which is asked waits for its own fetch before it says so, and most times that it may say so.
_COMING_S = 5.0
_MAX_COMING = 6


class AdapterPeers:
    """Requests of a worker for adapters, and its replies to those of others. Used from the worker's event loop only.

    `identity`: returns the name of this worker's copies, perhaps after it has read a file.
    """

    def __init__(self, peers: Peers, identity: Callable[[], str]) -> None:
        self._peers = peers
        self._identity = identity
        # Adapters that other workers are asked for now, with the worker; and the workers that wait for this one to have
        # an adapter.
        self._asked: dict[str, str] = {}
        self._waiting: dict[str, Counter[str]] = defaultdict(Counter)
        #: Workers that share this one's copies.
        self.sharing: set[str] = set()

    async def copy(self, peer: str, adapter_id: str, folder: Path, expected: Mapping[str, str] | None = None) -> None:
        """Copy an adapter's files from another worker. `expected`: versions of the files, where they are known.

        Raises `PeerLostError` when the worker does not give them, and ValueError for names that are no plain file
        names, a piece with another hash, or other files than expected.
        """
        self._asked[adapter_id] = peer
        try:
            sizes = await self._sizes(peer, adapter_id, is_copied=expected is not None)
            if expected is not None and set(sizes) != set(expected):
                raise ValueError(f"{peer} has other files of it")
            for name, size in sizes.items():
                await self._copy_file(peer, FetchAdapter(adapter_id, name), size, folder / name)
        finally:
            del self._asked[adapter_id]

    async def _sizes(self, peer: str, adapter_id: str, *, is_copied: bool) -> Mapping[str, int]:
        """Sizes of the files of an adapter that the worker has or gets. `is_copied`: whether it is one of the copies
        that workers may share.
        """
        copies = await asyncio.to_thread(self._identity) if is_copied else ""
        for _ in range(_MAX_COMING):
            waiting = (self._peers.address, *+self._waiting[adapter_id])
            asked = FetchAdapter(adapter_id, copies=copies, waiting=waiting)
            listed = await self._peers.ask(peer, asked, timeout_s=_PIECE_TIMEOUT_S)
            if listed.is_shared:
                self.sharing.add(peer)
                raise PeerLostError(f"{peer} shares copies")
            if listed.sizes is not None:
                return {_plain(name): size for name, size in listed.sizes.items()}
        raise PeerLostError(f"{peer} does not have it yet")

    async def _copy_file(self, peer: str, asked: FetchAdapter, size: int, path: Path) -> None:
        path.touch()
        offset = 0
        while offset < size:
            piece = FetchAdapter(asked.adapter_id, asked.name, offset)
            found = await self._peers.ask(peer, piece, timeout_s=_PIECE_TIMEOUT_S)
            await asyncio.to_thread(_append, path, found)
            offset += len(found.piece)

    async def reply(
        self, request: FetchAdapter, get: Callable[[], Coroutine[Any, Any, RegisterAdapter | str]]
    ) -> AdapterFiles:
        """The sizes of an adapter's files, or a piece of one, for another worker. `get`: gets the adapter.

        Raises what `get` raises, `StorageError` for an adapter that cannot be used and for one that this worker gets
        from a worker that waits for the reply, and OSError for one whose folder is gone again.
        """
        if self._asked.get(request.adapter_id) in request.waiting:
            raise StorageError("it waits for the worker that asks")
        if request.copies and request.copies == await asyncio.to_thread(self._identity):
            return AdapterFiles(is_shared=True)
        fetch = asyncio.ensure_future(get())
        waiting = self._waiting[request.adapter_id]
        waiting.update(request.waiting)
        await asyncio.wait([fetch], timeout=_COMING_S)
        waiting.subtract(request.waiting)
        if not fetch.done():
            fetch.add_done_callback(heard)
            return AdapterFiles()
        adapter = fetch.result()
        if isinstance(adapter, str):
            raise StorageError(adapter)
        folder = Path(adapter.folder)
        if request.name:
            return await asyncio.to_thread(_piece, folder / _plain(request.name), request.offset)
        return AdapterFiles({path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()})


def heard(done: asyncio.Future[Any]) -> None:
    """Take the exception of a future whose result no one may wait for, which asyncio would report."""
    if not done.cancelled():
        done.exception()


def _plain(name: str) -> str:
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no file name")
    return name


def _piece(path: Path, offset: int) -> AdapterFiles:
    with path.open("rb") as file:
        file.seek(offset)
        piece = file.read(_PIECE_BYTES)
    return AdapterFiles(piece=piece, sha256=hashlib.sha256(piece).hexdigest())


def _append(path: Path, found: AdapterFiles) -> None:
    if not found.piece or hashlib.sha256(found.piece).hexdigest() != found.sha256:
        raise ValueError(f"{path.name}: a piece of it is not what was sent")
    with path.open("ab") as file:
        file.write(found.piece)
