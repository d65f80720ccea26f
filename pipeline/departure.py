"""A worker process that is told to leave closes its Dask worker first, which hands over what its engines have begun.

Dask's nannies start worker processes that die at SIGTERM, while batch systems send it to every process of a worker that
is preempted.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading

from distributed import Worker

logger = logging.getLogger(__name__)


def leave_on_sigterm(worker: Worker) -> None:
    """Have this process close the worker at SIGTERM, unless somebody has said otherwise. From the event loop only."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _leave, worker)


def _leave(worker: Worker) -> None:
    logger.info("told to leave: engines hand over what they have begun")
    # The nanny stays: it gets a signal of its own when it is to leave too, and else starts another worker.
    worker.loop.add_callback(worker.close, nanny=False, reason="SIGTERM")
