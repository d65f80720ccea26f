"""Has an engine's kernels compiled by other processes while it loads its weights, into Triton's own cache.

Triton compiles a kernel when it is first launched, one after the other: without this, the first steps of a job wait for
it. `compile_process` says how kernels are found and compiled. What fails there costs nothing but time: a kernel that is
not in the cache is compiled when it is first launched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ...kernels.launch import COMPILE_VARIABLES
from ...system.confinement import python_command
from ..config import BaseQuantization

logger = logging.getLogger(__name__)
# Environment variable that is `0` where kernels are compiled when they are first launched. It belongs to a host, as the
# cache does, and not to a job.
_VARIABLE = "LORABATCH_COMPILE_AHEAD"
_MODULE = f"{__package__}.compile_process"
_ROOT = Path(__file__).parents[2]
# Compiling takes no GPU, and libraries' threads would only be in each other's way.
_ENVIRONMENT = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
# On one core all kernels of an 8B take a tenth of this.
_LONGEST_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """Facts of an engine that decide the code of its kernels."""

    #: Folder of the base model; only its `config.json` matters.
    model_folder: str
    #: Number format of activations and pool, a name of torch's.
    dtype: str
    #: Compute capability of the GPU; 90 is 9.0.
    capability: int
    #: Tokens of a page.
    page_tokens: int = 16
    #: Number format of the layers' linear weights.
    base_quantization: BaseQuantization = "none"
    #: Members that have a part of the model each, all parts of equal shape.
    tensor_parallel: int = 1
    #: Whether bits of a row depend on that row alone.
    is_exact: bool = False

    @property
    def done(self) -> Path:
        """The file that says that all of them are in Triton's cache. It is in the cache, and goes with it."""
        from triton import __version__, knobs

        digest = hashlib.sha256(f"{__version__} {sorted(_variables())}".encode())
        digest.update(json.dumps(asdict(self) | {"model_folder": ""}).encode())
        sources = (path for room in ("engine", "kernels") for path in (_ROOT / room).rglob("*.py"))
        for path in (Path(self.model_folder, "config.json"), *sorted(sources)):
            digest.update(path.read_bytes())
        return Path(knobs.cache.dir) / f"lorabatch-{digest.hexdigest()[:32]}.json"


def _variables() -> Iterator[tuple[str, str]]:
    """Names and values of the environment variables that change how kernels are compiled."""
    others = ("TRITON_CACHE_DIR", *_ENVIRONMENT)
    for name, value in os.environ.items():
        if name in COMPILE_VARIABLES or (name.startswith("TRITON_") and name not in others):
            yield name, value


def is_compiled_ahead() -> bool:
    """Whether engines of this host have their kernels compiled ahead."""
    return os.environ.get(_VARIABLE, "1") != "0"


def start_compiling(kernels: EngineKernels) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles an engine's kernels, and ends with this one. None where all of them are in the
    cache, or where it cannot be started, which is a warning.
    """
    try:
        return None if kernels.done.exists() else start_compiler(_MODULE, json.dumps(asdict(kernels)))
    except OSError as error:
        _warn(str(error))
        return None


def wait_until_compiled(process: subprocess.Popen[bytes], longest_s: float = _LONGEST_WAIT_S) -> None:
    """Wait at most `longest_s` until all kernels are compiled. Logs a warning that names those that are not."""
    _, missing = result_of(process, longest_s)
    if missing:
        _warn(missing)


def _warn(missing: str) -> None:
    logger.warning("not compiled ahead, but when they are first launched: GPU kernels (%s)", missing)


def start_compiler(module: str, argument: str) -> subprocess.Popen[bytes]:
    """Start a process that compiles kernels: `python -m MODULE PARENT ARGUMENT`. It prints what `result_of` reads."""
    command = python_command(module, str(os.getpid()), argument)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT)


def result_of(process: subprocess.Popen[bytes], longest_s: float) -> tuple[int, str]:
    """Wait at most `longest_s` for a process that compiles kernels. Returns the number of kernels that may have been
    missing from the cache, and which are missing now, or why none was tried; "" where none is missing.
    """
    try:
        output, _ = process.communicate(timeout=longest_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 0, f"compiling took longer than {longest_s:.0f} s"
    if process.returncode:
        return 0, f"the process that compiles them ended with code {process.returncode}"
    found = json.loads(output)
    return found["num_kernels"], ", ".join(found["failed"])
