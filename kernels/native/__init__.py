"""Loads the compiled CPU kernels, if they were built when the package was installed.

They are plain C with OpenMP, compiled for AVX-512 and for AVX2, and called with addresses. Nothing is compiled while
a job runs; where no library fits (no C compiler at installation, another processor) callers take their torch path.
The threads are torch's own: its OpenMP library is in the process already, and these libraries contain none.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int64
NUMBER = ctypes.c_float
#: Number formats of the page pool (keys, values, adapters), and their numbers in vector.h.
POOL_TYPES = {torch.float32: 0, torch.bfloat16: 3}
_BF16_PAIRS = 1
# Version of the functions' arguments, as in kernels.h; raise it with every change of them. A library with another
# version is not used.
_VERSION = 24


@cache
def native_function(name: str, *argument_types: Any) -> Callable[..., None] | None:
    """The compiled function of this name, or None without a library."""
    library = _library()
    if library is None:
        return None
    function: Any = getattr(library, name)
    function.argtypes = argument_types
    function.restype = None
    return function  # type: ignore[no-any-return]


def adapter_type(dtype: torch.dtype, depths: Iterable[int]) -> int:
    """The type of the panels of an adapter's matrices at one layer, as in vector.h: bf16 in pairs when all depths
    (inputs, ranks) are even."""
    is_paired = dtype == torch.bfloat16 and not any(depth % 2 for depth in depths)
    return _BF16_PAIRS if is_paired else POOL_TYPES[dtype]


def native_number(name: str) -> int:
    """Calls the compiled function of this name, which has no arguments. Returns its number; 0 without a library."""
    library = _library()
    return int(getattr(library, name)()) if library is not None else 0


def native_build() -> str | None:
    """Instruction set of the library in use ("avx512", "avx2"), or None."""
    return torch.backends.cpu.get_cpu_capability().lower() if _library() is not None else None


@cache
def _library() -> ctypes.CDLL | None:
    build = torch.backends.cpu.get_cpu_capability().lower()
    for path in Path(__file__).parent.glob(f"_{build}.*so"):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # built against what this system or torch lacks
            continue
        if library.lorabatch_kernels_version() == _VERSION:
            return library
    logger.warning(
        "There are no compiled CPU kernels for this processor (%s): torch does their work, and steps on a CPU take "
        "longer. With a C compiler that knows OpenMP, installing lorabatch again builds them.",
        build,
    )
    return None
