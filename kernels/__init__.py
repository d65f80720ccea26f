"""Operators on tensors, one folder each: the operator, its types, its reference, and its CPU and Triton back ends.

Operators that only engines on GPUs call are kernels of Triton, which also run in its interpreter. They import Triton
when they are called, so that engines on CPUs never load it.
"""

from __future__ import annotations

import platform
import re
from importlib.util import find_spec
from pathlib import Path

_PROCESSOR = Path("/proc/cpuinfo")
# Instruction set -> its flags in Linux. Kernels are compiled for the first two, see pyproject.toml.
_INSTRUCTIONS = {
    "AVX-512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "AVX2": {"avx2", "fma", "f16c"},
    "AVX512_BF16": {"avx512_bf16"},
    "AVX512_VNNI": {"avx512_vnni"},
    "AVX_VNNI": {"avx_vnni"},
}


def lacks_compiled_kernels() -> bool:
    """Whether the CPU kernels for processors of this kind were not built when the package was installed."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and not any(Path(__file__).parent.glob("native/_avx*.so"))


def lacks_triton() -> bool:
    """Whether the package Triton is not installed, which engines on GPUs need."""
    return find_spec("triton") is None


def cpu_instructions() -> tuple[str, ...]:
    """Instruction sets of this processor that CPU kernels use. Empty when the system lists no flags."""
    try:
        flags = re.search(r"^flags\s*: (.*)$", _PROCESSOR.read_text(), re.MULTILINE)
    except OSError:
        return ()
    has = set(flags[1].split()) if flags else set()
    return tuple(name for name, needed in _INSTRUCTIONS.items() if needed <= has)
