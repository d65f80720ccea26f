"""Finds the device on which a job's engines will run, and its memory, without starting CUDA.

On this machine the driver is asked (NVML, a library that every NVIDIA driver brings). On another cluster its workers
are asked. Where nothing answers, a device is assumed, and `Device.assumption` says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Client

from ...engine.config import DeviceKind
from ...engine.memory.limits import total_host_bytes
from ...kernels import cpu_instructions, lacks_compiled_kernels
from .worker_process import visible_gpus

logger = logging.getLogger(__name__)
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_ANSWER_LIMIT_S = 10.0
# The GPU that the preset cost model stands for.
_ASSUMED_GPU, _ASSUMED_GPU_BYTES = "H200", 141 * 10**9
# Measured on the demo and on `bench engine`, AVX-512 and two cores: 1.3 to 1.4.
_SLOW_KERNELS = (
    "compiled CPU kernels are missing: about 1.3 times slower. A C compiler, such as gcc, builds them when lorabatch "
    "is installed again: pip install --force-reinstall --no-deps CHECKOUT"
)


@dataclass(frozen=True, slots=True)
class Device:
    """What an engine runs on. `memory_bytes`: of a GPU, or of the machine. `assumption`: a sentence, when it was not
    found but assumed. `lacks_compiled_kernels`, `instructions`: of a CPU, see `kernels`. `uuids`: of the GPUs of an
    engine, of which `name` and `memory_bytes` are those with the least memory. `num_sharing`: workers that have named
    the GPU that most of them have named, `shared_uuid`.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    assumption: str = ""
    lacks_compiled_kernels: bool = False
    instructions: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    num_sharing: int = 1
    shared_uuid: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it and did not ask."""
        notes = [_SLOW_KERNELS] if self.lacks_compiled_kernels else []
        if self.num_sharing > 1:
            notes.append(
                f"{self.num_sharing} workers use one GPU, {self.shared_uuid}: the engine that starts last finds the "
                f"memory that others leave. {self._advice}"
            )
        return tuple(notes)

    @property
    def _advice(self) -> str:
        if len(self.uuids) > 1:
            return f"Start each worker with {len(self.uuids)} GPUs of its own, with CUDA_VISIBLE_DEVICES"
        return "Start one worker for each GPU, with CUDA_VISIBLE_DEVICES or dask-cuda"

    @property
    def title(self) -> str:
        """For people: its name, of a CPU with the vectors that kernels use."""
        has_vectors = self.instructions and self.instructions[0].startswith("AVX")
        return f"{self.name} with {self.instructions[0]}" if has_vectors else self.name


def device_kind(asked: str) -> DeviceKind:
    """`cpu` or `cuda`, as engines of this machine would choose."""
    if asked != "auto":
        return "cpu" if asked.partition(":")[0] == "cpu" else "cuda"
    return "cuda" if _NVIDIA_DRIVER.exists() else "cpu"


def find_device(asked: str, num_gpus: int = 1) -> Device:
    """The device of this machine's engines, as `--device` asks, `num_gpus` of which an engine takes, or as many as
    there are. Runs on workers too."""
    if device_kind(asked) == "cpu":
        return Device("cpu", "CPU", total_host_bytes(), "", lacks_compiled_kernels(), cpu_instructions())
    _, _, number = asked.partition(":")
    first = int(number) if number.isdecimal() else 0
    found = [gpu for place in range(first, first + num_gpus) if (gpu := _gpu(place)) is not None]
    if not found:
        return _assumed_gpu("no NVIDIA driver answers here")
    least = min(found, key=lambda gpu: gpu.memory_bytes)
    return replace(least, uuids=tuple(uuid for gpu in found for uuid in gpu.uuids))


def find_device_of_workers(client: Client, asked: str, num_gpus: int = 1) -> Device:
    """The device of a cluster's workers; of several kinds, that with the least memory. `num_gpus`: of an engine."""
    try:
        replies: dict[str, Any] = client.sync(
            client._run, find_device, asked, num_gpus, on_error="return", callback_timeout=_ANSWER_LIMIT_S
        )
    except TimeoutError:
        logger.warning("some workers did not reply with their device within %.0f s", _ANSWER_LIMIT_S)
        replies = {}
    return least_device((reply for reply in replies.values() if isinstance(reply, Device)), asked)


def least_device(found: Iterable[Device], asked: str) -> Device:
    """Of the devices that workers have named, one with the fewest GPUs and the least memory, of such one without
    compiled kernels; an assumption where none was named. It says which GPU several workers have named.
    """
    devices = sorted(
        found, key=lambda d: (bool(d.assumption), len(d.uuids), d.memory_bytes, not d.lacks_compiled_kernels)
    )
    if devices:
        times = Counter(uuid for device in devices for uuid in device.uuids).most_common(1)
        return replace(devices[0], shared_uuid=times[0][0], num_sharing=times[0][1]) if times else devices[0]
    reason = "no worker of the cluster has named its device"
    if device_kind(asked) == "cuda":
        return _assumed_gpu(reason)
    here = find_device(asked)
    return Device("cpu", here.name, here.memory_bytes, f"{reason}: a CPU with this machine's memory is assumed")


def _assumed_gpu(reason: str) -> Device:
    gigabytes = _ASSUMED_GPU_BYTES // 10**9
    assumption = f"{reason}: a GPU with the {gigabytes} GB of an {_ASSUMED_GPU} is assumed"
    return Device("cuda", _ASSUMED_GPU, _ASSUMED_GPU_BYTES, assumption)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu(place: int) -> Device | None:
    """The GPU at a place among those that this process may use, by NVML; None where it cannot be asked."""
    visible = visible_gpus(os.environ)
    if place >= len(visible):
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() != 0:
        return None
    try:
        if visible[place].isdecimal():
            problem = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(visible[place])), ctypes.byref(handle))
        else:
            problem = library.nvmlDeviceGetHandleByUUID(visible[place].encode(), ctypes.byref(handle))
        problem = problem or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        problem = problem or library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
        problem = problem or library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    finally:
        library.nvmlShutdown()
    if problem:
        return None
    shown = name.value.decode(errors="replace")
    return Device("cuda", shown, int(memory.total), uuids=(uuid.value.decode(errors="replace"),))
