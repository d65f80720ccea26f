"""Preloaded into the workers of an embedded cluster: they share a terminal with the command that started them, and the
machine's GPUs with one another.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from distributed import Worker

from .engine_host import worker_log_path
from .gpus import VISIBLE_DEVICES, gpu_of_worker, visible_gpus


def dask_setup(worker: Worker) -> None:
    """Write to a log file instead of the terminal, leave Ctrl-C to the command, and keep to one GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gpu = gpu_of_worker(int(worker.name), visible_gpus(os.environ))
    if gpu is not None:
        os.environ[VISIBLE_DEVICES] = gpu  # the engine is a child of this process
    path: Path = worker_log_path(worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logger = logging.getLogger("lorabatch")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)
