"""Starts engine processes, also spare ones before their engine is known.

Python takes longer to import torch and the engine than a small model takes to load. A worker of an embedded cluster
therefore starts a spare process as it starts itself. The process has no data of a job: the first engine with the same
number of threads takes it and sends it the usual messages. If there is none, or it has ended, the engine starts a
process of its own.

This module imports little, so that the spare starts before its worker has imported the rest.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from ...system.confinement import python_command

_SERVER = "lorabatch.engine.server.process"
# Module that a spare process imports while it waits.
_ENGINE = "lorabatch.engine.engine"
# Variables that libraries read as they load; the nanny has set some of them to 1 for the worker itself.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Variable that the nanny sets for the worker, so that memory goes back to the system at every free. An engine needs the
# same sizes again in the next layer and would pay in page faults: 10 to 25 % of a step on a CPU (SmolLM2-135M,
# measured).
TRIM_VARIABLE = "MALLOC_TRIM_THRESHOLD_"
# Spins for which a thread of GNU OpenMP that waits for others keeps its core before it sleeps, several times in each
# layer. With the long default, beside other work, waiting threads take the core from the thread that they wait for, and
# a step takes 5 to 15 times as long (two threads, two busy cores). A thirtieth of the default costs an idle machine
# nothing; much less does.
_WAITING = {"GOMP_SPINCOUNT": "10000"}
# Variables that let blocks which torch has taken on a GPU grow, instead of staying unused beside larger ones: scratch
# memory grows with steps. Versions of torch know one name or the other.
_GPU_MEMORY = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


class SpareEngine:
    """A process that no engine has taken yet, and `folder`, the folder for the files of the engine that takes it.

    `parent`: folder in which `folder` is made. The process ends with this one, as engines do.
    """

    def __init__(self, parent: str, num_threads: int) -> None:
        self.folder = engine_folder(parent)
        self._num_threads = num_threads
        process = start_engine_process(engine_log(Path(self.folder.name)), num_threads, _ENGINE)
        self.pid = process.pid
        self._process: subprocess.Popen[bytes] | None = process

    def take(self, num_threads: int | None) -> subprocess.Popen[bytes] | None:
        """Hand out the process, once; None when it was taken, has ended, or has another number of threads."""
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
    """Make a temporary folder in `parent` for the files of one engine."""
    return TemporaryDirectory(prefix="lorabatch-engine-", dir=parent)


def engine_log(folder: Path) -> Path:
    """Path of the file for an engine process's output."""
    return folder / "engine.log"


def start_engine_process(log_path: Path, num_threads: int | None, imported: str = "") -> subprocess.Popen[bytes]:
    """Start an engine process that waits for its `Start` on its standard input. Its standard error goes to a log file.

    `multiprocessing` children are refused in nannied workers, so this is a plain subprocess. `imported`: name of a
    module that it imports while it waits; "" for none.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            python_command(_SERVER, *([imported] if imported else [])),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=engine_environment(os.environ, num_threads),
            # Ctrl-C in a terminal reaches the whole foreground group; the supervisor ends engines itself.
            start_new_session=True,
        )


def engine_environment(inherited: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    """Environment of an engine process, made from `inherited`, the environment of its worker."""
    threads = dict.fromkeys(_THREAD_VARIABLES, str(num_threads)) if num_threads else {}
    kept = {name: value for name, value in inherited.items() if name != TRIM_VARIABLE}
    waiting = {} if "OMP_WAIT_POLICY" in kept else _WAITING
    memory = {} if _GPU_MEMORY.keys() & kept.keys() else _GPU_MEMORY
    return waiting | memory | kept | threads
