"""Operators on tensors, one folder each: the operator, its types, its reference, and its CPU and Triton back ends."""

from __future__ import annotations

import platform
from pathlib import Path


def lacks_compiled_kernels() -> bool:
    """Whether the CPU kernels for processors of this kind were not built when the package was installed."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and not any(Path(__file__).parent.glob("native/_avx*.so"))
