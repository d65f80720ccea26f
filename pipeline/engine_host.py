"""`EngineHost`: the worker plugin that owns a worker's engine.

Dask sets it up on every worker, also on those that join or restart later. `setup` starts the engine process and
returns at once: loading weights takes longer than a worker may be silent. Readiness is told by reports.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from .. import __version__
from ..jobs.local_copy import local_folder
from ..jobs.record import JobRecord
from ..jobs.store import JobStore
from .engine_keeper import EngineKeeper, LocalAdapter
from .messages import AdapterSource, EngineSettings, HostReport, report_topic

_CLOSE_TIMEOUT_S = 5.0


def host_name(job_id: str) -> str:
    """The plugin's name on every worker: one per job and version."""
    return f"lorabatch-{job_id}-{__version__}"


class EngineHost(WorkerPlugin):
    """One engine on one worker, for one job."""

    idempotent = True

    def __init__(self, job_id: str, settings: EngineSettings, store: JobStore) -> None:
        self.name = host_name(job_id)
        self._topic = report_topic(job_id)
        self._settings = settings
        self._store = store

    def setup(self, worker: Worker) -> None:
        """Start the engine process; called by Dask on the worker."""
        self._worker = worker
        self._record: JobRecord | None = None
        self._record_lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="lorabatch-host-")
        self._log_path = Path(self._folder.name) / "engine.log"
        self._log_path.touch()
        self._log_sent_bytes = 0
        self.keeper = EngineKeeper(self._settings, self._find_model, self._log_path, self._send, worker.address)

    def teardown(self, worker: Worker) -> None:
        """End the engine; open shards are abandoned and keep their finished rows in `wip`."""
        self.keeper.close(_CLOSE_TIMEOUT_S)
        self.send_log()
        self._folder.cleanup()

    @property
    def store(self) -> JobStore:
        """Where the job lives."""
        return self._store

    @property
    def address(self) -> str:
        """The worker's Dask address."""
        return str(self._worker.address)

    def record(self) -> JobRecord:
        """The frozen job, read once."""
        with self._record_lock:
            if self._record is None:
                self._record = self._store.read_record()
            return self._record

    def local_adapters(self, adapter_ids: frozenset[str]) -> list[LocalAdapter]:
        """The named adapters, by content hash, in local folders; fetched if they lie elsewhere."""
        found = []
        for adapter in self.record().adapters:
            if adapter.sha256 in adapter_ids and not adapter.is_refused:
                folder = local_folder(adapter.url, self._settings.storage_options)
                found.append(LocalAdapter(AdapterSource(adapter.sha256, adapter.name, adapter.url), folder))
        return found

    def send_log(self) -> None:
        """Append what the engine process has said since the last call to the job's logs."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_sent_bytes)
            fresh = log.read()
        if fresh:
            self._log_sent_bytes += len(fresh)
            self._store.append_log(_log_source(self.address), fresh.decode("utf-8", "replace"))

    def _find_model(self) -> Path:
        return local_folder(self._settings.model_url, self._settings.storage_options)

    def _send(self, report: HostReport) -> None:
        """Called by the keeper's thread; Dask's streams belong to the event loop's."""
        self._worker.loop.add_callback(self._worker.log_event, self._topic, report.to_plain())


def _log_source(address: str) -> str:
    kept = (character if character.isalnum() else "-" for character in address.rpartition("//")[2])
    return f"engine-{''.join(kept)}"


def find_host(worker: Worker, job_id: str) -> EngineHost:
    """The job's host on this worker. Raises RuntimeError when Dask has not set it up."""
    host: Any = worker.plugins.get(host_name(job_id))
    if not isinstance(host, EngineHost):
        raise RuntimeError(f"worker {worker.address} has no engine for job {job_id}: its plugin was not set up")
    return host
