"""Log lines of this process go to the job's logs, and nowhere near the terminal, while a job runs."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..jobs.store import JobStore
from .log_shipper import LogShipper

# The embedded cluster's scheduler and nannies live in this process and log under `distributed`; what they do when
# all is well would bury the job's own lines.
_LOGGERS = ("lorabatch", "distributed", "tornado", "bokeh", "asyncio")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def job_log(store: JobStore) -> Iterator[None]:
    """Send what this process logs to the job's log `client`; loggers are as before afterwards.

    Jobs that a process runs at the same time, in threads of its own, each log all of it.
    """
    with tempfile.TemporaryDirectory(prefix="lorabatch-log-") as folder:
        path = Path(folder) / "client.log"
        handler = _JobHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.take_loggers()
        shipper = LogShipper(store, {"client": path})
        try:
            yield
        finally:
            handler.give_loggers_back()
            handler.close()
            shipper.close()


class _JobHandler(logging.FileHandler):
    """One job's log file. The first job takes the loggers from whoever had them, the last gives them back."""

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
