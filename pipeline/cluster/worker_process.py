"""Sets up worker processes: logs, signals and GPUs of embedded workers, threads and an orderly end of all workers.

Embedded workers share a terminal with the command that started them, and the machine's GPUs with one another; Dask
preloads this module into them (`dask_setup`).

Dask's nannies start worker processes that die at SIGTERM, which batch systems send to every process of a worker that is
preempted. `leave_on_sigterm` has the process close its Dask worker first, which hands over the rows its engines have
begun.

Dask counts a thread as one of its pool before it starts it. Where the system refuses the thread (a limit of processes
or memory), the task fails for which it was to start, and a worker of one thread lives on and never begins another.
`let_pools_wait` has the task wait instead, and `revive_pools` starts the thread when there is room again. Beside
documented names they use `_threads` and `_adjust_thread_count` of `distributed.threadpoolexecutor`; the test of this
file says what is relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal

import dask
from distributed import Nanny, Worker
from distributed.protocol.pickle import dumps
from distributed.threadpoolexecutor import ThreadPoolExecutor, threads_lock

from ...jobs.input.without_pandas import leave_out_pandas
from ...system.untrusted import LogFormatter

logger = logging.getLogger(__name__)
# Key in Dask's configuration: CPU threads of the spare engine process that a worker starts (`worker/spare.py`).
SPARE_THREADS = "lorabatch.spare-engine-threads"
# Key in Dask's configuration: GPUs of each worker, as many as an engine has processes.
GPUS_EACH = "lorabatch.gpus-each"
# Seconds that a worker may take to end in order, which keeps its finished rows. Dask's default of 5 s is too little
# where many processes want the cores.
_END_LIMIT_S = 20.0
# Seconds after SIGTERM at which its nanny kills a worker that has not ended. Leaving takes seconds, on a busy machine
# more.
_LEAVES_WITHIN_S = 60.0
_NANNY_ANSWERS_WITHIN_S = 2.0
_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def worker_log_path(worker: Worker) -> Path:
    """Path of the file to which a worker of an embedded cluster writes its output."""
    return Path(worker.local_directory) / "lorabatch-worker.log"


def dask_setup(worker: Worker) -> None:
    """Write to a log file instead of the terminal, leave Ctrl-C to the command, keep to its own GPUs, and be light."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_out_pandas()
    worker.http_server.stop()  # it has no key, and nothing to show: see `_SETTINGS` of `connect`
    gpus = gpus_of_worker(int(worker.name), visible_gpus(os.environ), dask.config.get(GPUS_EACH, 1))
    if gpus:
        os.environ[VISIBLE_DEVICES] = ",".join(gpus)  # the engine is a child of this process
    path: Path = worker_log_path(worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logger = logging.getLogger("lorabatch")
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(_FORMAT))
    logger.addHandler(handler)


class EmbeddedNanny(Nanny):
    """A nanny whose worker does not import the main module of its own process.

    `multiprocessing` has new processes import it, for functions that it may define. A script would run there again,
    unless it has a guard; workers need nothing of it.
    """

    async def instantiate(self) -> Any:
        """Start the worker's process, which does not import this process's main module."""
        with _MAIN_MODULE.left_out():
            return await super().instantiate()

    async def close(  # type: ignore[override]  # as in `Nanny`
        self, timeout: float = _END_LIMIT_S, reason: str = "nanny-close"
    ) -> Literal["OK"]:
        """Close the worker and this nanny, which kills a worker that has not ended after 4/5 of `timeout` (s)."""
        return await super().close(timeout, reason)


class _MainModule:
    """Renames the main module's spec while one or more workers start: `multiprocessing` does not import a main module
    with the name that it is given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_starting = 0
        self._own: ModuleSpec | None = None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        main = sys.modules["__main__"]
        with self._lock:
            if not self._num_starting:
                self._own, main.__spec__ = main.__spec__, ModuleSpec("lorabatch.__main__", None)
            self._num_starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_starting -= 1
                if not self._num_starting:
                    main.__spec__ = self._own


_MAIN_MODULE = _MainModule()


class _WarningsLog(logging.FileHandler):
    """Log file for this package's warnings in a worker process whose output does not go to `worker_log_path`."""


def keep_warnings(worker: Worker) -> None:
    """Write warnings of this package to `worker_log_path` too, where the output of the process does not go there."""
    package, path = logging.getLogger("lorabatch"), worker_log_path(worker)
    for handler in [handler for handler in package.handlers if isinstance(handler, _WarningsLog)]:
        if Path(handler.baseFilename).exists():
            return  # this worker's file, or that of another worker in this process
        package.removeHandler(handler)
        handler.close()
    if not path.exists():
        handler = _WarningsLog(path, encoding="utf-8")
        handler.setLevel(logging.WARNING)
        handler.setFormatter(LogFormatter(_FORMAT))
        package.addHandler(handler)


def let_pools_wait(worker: Worker) -> None:
    """Have tasks wait where the system refuses a thread of the worker's pools, until `revive_pools` has started it."""
    for executor in _pools(worker):
        if "_adjust_thread_count" not in vars(executor):
            executor._adjust_thread_count = partial(_start_or_wait, executor)  # type: ignore[method-assign]


def _start_or_wait(executor: ThreadPoolExecutor) -> None:
    try:
        ThreadPoolExecutor._adjust_thread_count(executor)
    except RuntimeError as error:
        logger.warning("a thread for tasks cannot be started (%s); it is tried again", error)


def revive_pools(worker: Worker) -> None:
    """Start the threads that a worker's pools count and that were never started, if the system lets it now."""
    for executor in _pools(worker):
        with threads_lock, executor._shutdown_lock:  # no other thread is about to start one
            lost = [thread for thread in executor._threads if thread.ident is None]
            executor._threads.difference_update(lost)
            for _ in lost:
                _start_or_wait(executor)


def _pools(worker: Worker) -> list[ThreadPoolExecutor]:
    return [pool for pool in set(worker.executors.values()) if isinstance(pool, ThreadPoolExecutor)]


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE_NAME = re.compile(r"nvidia(\d+)")


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that processes with this environment may use, named as `CUDA_VISIBLE_DEVICES` names them."""
    visible = environment.get(VISIBLE_DEVICES)
    if visible is not None:
        # CUDA takes the list up to the first name that means none.
        names = [name.strip() for name in visible.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1", "none", "void")), len(names))
        return tuple(names[:end])
    found = (_DEVICE_NAME.fullmatch(path.name) for path in devices.glob("nvidia*"))
    # CUDA counts devices from 0, whatever numbers their files have.
    return tuple(str(i) for i, _ in enumerate(match for match in found if match))


def gpus_of_worker(number: int, gpus: tuple[str, ...], num_each: int) -> tuple[str, ...]:
    """The GPUs of an embedded worker: `num_each` of them, or all if `gpus` has fewer. When there are more workers than
    such groups of GPUs, workers share them in turn.
    """
    first = number % max(1, len(gpus) // num_each) * num_each
    return gpus[first : first + num_each]


def leave_on_sigterm(worker: Worker) -> None:
    """Have this process close the worker at SIGTERM, unless it has a handler already. From the event loop only."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.loop.add_callback, _leave, worker)


async def _leave(worker: Worker) -> None:
    logger.info("SIGTERM: the worker leaves, its engines hand over begun rows")
    # The worker's nanny may be gone, stopped or cut off.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(_have_nanny_watch(worker), _NANNY_ANSWERS_WITHIN_S)
    # The nanny stays: it gets a signal of its own when it is to leave too, and else starts another worker.
    await worker.close(nanny=False, reason="SIGTERM")


async def _have_nanny_watch(worker: Worker) -> None:
    """Have the worker's nanny kill this process if it has not ended within `_LEAVES_WITHIN_S`.

    The scheduler restarts workers that hang, but no longer knows a worker that hangs or is stopped while it leaves.
    """
    if worker.nanny is None:
        return
    arguments = {"pid": os.getpid(), "limit_s": _LEAVES_WITHIN_S}
    async with worker.rpc(worker.nanny) as nanny:  # type: ignore[arg-type]  # its address
        await nanny.run(function=dumps(_kill_late_worker), kwargs=dumps(arguments), wait=False)


async def _kill_late_worker(pid: int, limit_s: float, dask_worker: Nanny) -> None:
    await asyncio.sleep(limit_s)
    if dask_worker.pid == pid:
        logger.warning("the worker was to end at SIGTERM and has not: it is killed")
        os.kill(pid, signal.SIGKILL)
