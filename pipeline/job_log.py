"""Log lines of this process go to the job's logs, and nowhere near the terminal, while a job runs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..jobs.store import JobStore
from .log_shipper import LogShipper

# The embedded cluster's scheduler and nannies live in this process and log under `distributed`.
_LOGGERS = ("lorabatch", "distributed", "tornado", "bokeh", "asyncio")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def job_log(store: JobStore) -> Iterator[None]:
    """Send what this process logs to the job's log `client`; loggers are as before afterwards."""
    with tempfile.TemporaryDirectory(prefix="lorabatch-log-") as folder:
        path = Path(folder) / "client.log"
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter(_FORMAT))
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
        for logger in loggers:
            logger.handlers[:] = [handler]
            logger.propagate = False
        logging.getLogger("lorabatch").setLevel(logging.INFO)
        shipper = LogShipper(store, {"client": path})
        try:
            yield
        finally:
            for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
                logger.handlers[:], logger.propagate = handlers, propagate
                logger.setLevel(level)
            handler.close()
            shipper.close()
