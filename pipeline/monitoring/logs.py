"""`LogShipper` copies log files into the job's own logs; `job_log` sends a process's log lines there.

While a job runs, no log line of its process reaches the terminal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...jobs.errors import StorageError
from ...jobs.store import JobStore
from ...system.local_cache import temporary_folder
from ...system.untrusted import LogFormatter, printable

logger = logging.getLogger(__name__)
LOCAL_INTERVAL_S = 2.0
# Seconds between shipments to an object store, where every shipment is an object.
REMOTE_INTERVAL_S = 20.0
MAX_SHIPMENT_BYTES = 1 << 20


class LogShipper:
    """Ships text appended to `files` (name of the log -> local file, which need not exist yet) until it is closed.

    `shared`: names of logs to whose files others have written before; only text appended from now on is shipped.
    `interval_s`: seconds between shipments; the default depends on the kind of storage.
    """

    def __init__(
        self,
        store: JobStore,
        files: Mapping[str, Path],
        shared: Collection[str] = (),
        *,
        interval_s: float | None = None,
        max_shipment_bytes: int = MAX_SHIPMENT_BYTES,
    ) -> None:
        self._store = store
        self._interval_s = interval_s or (LOCAL_INTERVAL_S if store.location.is_local else REMOTE_INTERVAL_S)
        self._max_shipment_bytes = max_shipment_bytes
        self._files: dict[str, Path] = {}
        self._shipped_bytes: dict[str, int] = {}
        for name, path in files.items():
            self.add(name, path, is_shared=name in shared)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log shipper", daemon=True)
        self._thread.start()

    def add(self, name: str, path: Path, *, is_shared: bool = True) -> None:
        """Ship another file too. `is_shared`: only text that is appended from now on."""
        self._shipped_bytes[name] = path.stat().st_size if is_shared and path.exists() else 0
        self._files = {**self._files, name: path}  # the thread may be reading the present one

    def close(self, timeout_s: float = 10.0) -> None:
        """Ship the rest, and stop. Waits at most `timeout_s`."""
        self._is_closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            self._ship_all()
        self._ship_all()

    def _ship_all(self) -> None:
        for name, path in self._files.items():
            try:
                self._ship(name, path)
            except StorageError as error:
                # A lost log line must not cost a row; the local file keeps it for the next turn.
                logger.warning("log %s: %s", name, error)

    def _ship(self, name: str, path: Path) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._shipped_bytes[name])
            while fresh := file.read(self._max_shipment_bytes):
                is_cut = len(fresh) == self._max_shipment_bytes
                # Whole lines only, unless no more of the line will come.
                end = len(fresh) if self._is_closed.is_set() or is_cut else fresh.rfind(b"\n") + 1
                if end:
                    # A process may print anything, not only log records: progress bars end with carriage returns.
                    text = fresh[:end].decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
                    self._store.append_log(name, printable(text))
                    self._shipped_bytes[name] += end


# Loggers whose records go to the job's log. The embedded cluster's scheduler and nannies run in this process and log
# under `distributed`, of which only warnings are kept: routine records would bury the job's own lines.
_LOGGERS = ("lorabatch", "distributed", "tornado", "bokeh", "asyncio")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def job_log(store: JobStore) -> Iterator[None]:
    """Send this process's log records to the job's log `client` within the block.

    Jobs that a process runs at the same time, in threads of its own, each log the records of all of them.
    """
    with temporary_folder() as folder:
        path = folder / "client.log"
        handler = _JobHandler(path, encoding="utf-8")
        handler.setFormatter(LogFormatter(_FORMAT))
        handler.take_loggers()
        shipper = LogShipper(store, {"client": path})
        try:
            yield
        finally:
            handler.give_loggers_back()
            handler.close()
            shipper.close()


class _JobHandler(logging.FileHandler):
    """One job's log file. The first job saves the loggers' handlers, the last one restores them."""

    _lock_of_loggers = threading.Lock()

    def take_loggers(self) -> None:
        with self._lock_of_loggers:
            loggers = [logging.getLogger(name) for name in _LOGGERS]
            if not _job_handlers(loggers[0]):
                self.before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
                for logger in loggers:
                    logger.handlers[:], logger.propagate = [], False
                logging.getLogger("lorabatch").setLevel(logging.INFO)
                logging.getLogger("distributed").setLevel(logging.WARNING)
            for logger in loggers:
                logger.addHandler(self)

    def give_loggers_back(self) -> None:
        with self._lock_of_loggers:
            loggers = [logging.getLogger(name) for name in _LOGGERS]
            for logger in loggers:
                logger.removeHandler(self)
            others = _job_handlers(loggers[0])
            if others and hasattr(self, "before"):
                others[0].before = self.before
            if others:
                return
            for logger, (handlers, propagate, level) in zip(loggers, self.before, strict=True):
                logger.handlers[:], logger.propagate = handlers, propagate
                logger.setLevel(level)


def _job_handlers(logger: logging.Logger) -> list[_JobHandler]:
    return [handler for handler in logger.handlers if isinstance(handler, _JobHandler)]
