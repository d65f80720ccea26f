"""Adapters of one job as local folders on one worker: found once, and taken from another worker before storage."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..jobs.local_copy import local_folder
from ..jobs.record import AdapterRecord
from .messages import AdapterSource, LocalAdapter

logger = logging.getLogger(__name__)


class AdapterShelf:
    """What is there already, by content hash. `folder`: where copies from other workers go."""

    def __init__(self, adapters: Iterable[AdapterRecord], storage_options: Mapping[str, Any], folder: Path) -> None:
        self._sources = {
            adapter.sha256: AdapterSource(adapter.sha256, adapter.name, adapter.url)
            for adapter in adapters
            if not adapter.is_refused
        }
        self._storage_options = storage_options
        self._folder = folder
        self._found: dict[str, LocalAdapter] = {}
        self._lock = threading.Lock()

    def local(self, adapter_ids: Iterable[str]) -> list[LocalAdapter]:
        """The adapters in local folders; fetched from storage if they lie there. Raises `StorageError`."""
        return [self._local(adapter_id) for adapter_id in adapter_ids]

    def _local(self, adapter_id: str) -> LocalAdapter:
        with self._lock:
            found = self._found.get(adapter_id)
        if found is None:
            source = self._sources[adapter_id]
            found = LocalAdapter(source, local_folder(source.url, self._storage_options))
            with self._lock:
                self._found[adapter_id] = found
        return found

    def far(self, adapter_ids: Iterable[str]) -> list[str]:
        """Those that would have to be fetched from storage."""
        with self._lock:
            return [a for a in adapter_ids if a not in self._found and _is_remote(self._sources[a].url)]

    def files(self, adapter_id: str) -> dict[str, bytes]:
        """The files of an adapter that is here, by name, for another worker. Raises KeyError when it is not here."""
        with self._lock:
            folder = self._found[adapter_id].folder
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
        with self._lock:
            self._found.setdefault(adapter_id, LocalAdapter(self._sources[adapter_id], scratch))


def _is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")
