"""Starts engine processes, also before it is known what they will run: a spare one.

Python takes longer to import torch and the engine than a small model takes to load. A worker of an embedded cluster
starts a spare process as it starts itself. Nothing of a job is in it: the first engine with as many threads takes it
and sends it what any other process is sent. Where there is none, or it is gone, a process is started as ever.

This module imports little, so that the spare starts before its worker has imported the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

_SERVER = "lorabatch.engine.server.process"
# Imported by a spare process while it waits.
_ENGINE = "lorabatch.engine.engine"
# Libraries read these before they load; the nanny has set some of them to 1 for the worker itself.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Set by the nanny for the worker: memory goes back to the system at every free. An engine wants the same sizes again in
# the next layer and would pay in page faults: 10 to 25 % of a step on a CPU (SmolLM2-135M, measured).
TRIM_VARIABLE = "MALLOC_TRIM_THRESHOLD_"
# How long a thread of GNU OpenMP that waits for others keeps its core before it sleeps. By default for long, several
# times in each layer: beside other work these are taken from the very thread that is waited for, and a step takes 5 to
# 15 times as long (two threads, two busy cores). A thirtieth of it costs an idle machine nothing, much less does.
_WAITING = {"GOMP_SPINCOUNT": "10000"}
# Of a GPU, blocks that torch has taken grow instead of lying unused beside larger ones: scratch grows with steps. Both
# names, as versions of torch know one or the other.
_GPU_MEMORY = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


class SpareEngine:
    """A process that no engine has taken yet, and `folder`, of the files of the engine that will.

    `parent`: which is to hold that folder. The process ends with this one, as engines do.
    """

    def __init__(self, parent: str, num_threads: int) -> None:
        self.folder = engine_folder(parent)
        self._num_threads = num_threads
        process = start_engine_process(engine_log(Path(self.folder.name)), num_threads, _ENGINE)
        self.pid = process.pid
        self._process: subprocess.Popen[bytes] | None = process

    def take(self, num_threads: int | None) -> subprocess.Popen[bytes] | None:
        """The process, once; None when it is gone or has another number of threads."""
        process = self._process
        if process is None or process.poll() is not None or num_threads != self._num_threads:
            self.close()
            return None
        self._process = None
        return process

    def close(self) -> None:
        """End the process unless it was taken."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()


def engine_folder(parent: str) -> TemporaryDirectory[str]:
    """A folder for the files of one engine."""
    return TemporaryDirectory(prefix="lorabatch-engine-", dir=parent)


def engine_log(folder: Path) -> Path:
    """Where an engine process prints."""
    return folder / "engine.log"


def start_engine_process(log_path: Path, num_threads: int | None, imported: str = "") -> subprocess.Popen[bytes]:
    """Start an engine process that waits for its `Start` on its standard input. Its standard error goes to a log file.

    `multiprocessing` children are refused in nannied workers, so this is a plain subprocess. `imported`: a module that
    it imports meanwhile.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", _SERVER, *([imported] if imported else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=engine_environment(os.environ, num_threads),
            # Ctrl-C in a terminal reaches the whole foreground group; the supervisor ends engines itself.
            start_new_session=True,
        )


def engine_environment(inherited: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    """The environment of an engine process, from that of its worker."""
    threads = dict.fromkeys(_THREAD_VARIABLES, str(num_threads)) if num_threads else {}
    kept = {name: value for name, value in inherited.items() if name != TRIM_VARIABLE}
    waiting = {} if "OMP_WAIT_POLICY" in kept else _WAITING
    memory = {} if _GPU_MEMORY.keys() & kept.keys() else _GPU_MEMORY
    return waiting | memory | kept | threads
