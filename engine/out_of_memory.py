"""Whether an engine died of memory: it said so, or the kernel ended it."""

from __future__ import annotations

from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
# What torch's allocators say where they raise a plain RuntimeError.
_SAID = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


def kernel_kills(vmstat: Path = _VMSTAT) -> int:
    """Processes of this machine that Linux has ended for want of memory since it started; 0 where nobody counts.

    A process killed by signal 9 while this rose most likely died of memory.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
