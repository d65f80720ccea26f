"""NVIDIA GPUs of this machine, found without CUDA, and which of them the engine of an embedded worker uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEVICE_NAME = re.compile(r"nvidia(\d+)")


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that processes with this environment may use, named as `CUDA_VISIBLE_DEVICES` names them."""
    told = environment.get(VISIBLE_DEVICES)
    if told is not None:
        # CUDA takes the list up to the first name that means none.
        names = [name.strip() for name in told.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1", "none", "void")), len(names))
        return tuple(names[:end])
    found = (_DEVICE_NAME.fullmatch(path.name) for path in devices.glob("nvidia*"))
    # CUDA counts devices from 0, whatever numbers their files have.
    return tuple(str(i) for i, _ in enumerate(match for match in found if match))


def gpu_of_worker(number: int, gpus: tuple[str, ...]) -> str | None:
    """The one GPU of an embedded worker; workers beyond the GPUs share them in turn. None without any."""
    return gpus[number % len(gpus)] if gpus else None
