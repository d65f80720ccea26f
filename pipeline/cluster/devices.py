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

from ...engine.config import FP8_CAPABILITY, DeviceKind
from ...engine.memory.limits import Host, this_host, total_host_bytes
from ...kernels import cpu_instructions, lacks_compiled_kernels, lacks_triton
from .worker_process import visible_gpus

logger = logging.getLogger(__name__)
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_ANSWER_LIMIT_S = 10.0
# The GPU that the preset cost model stands for.
_ASSUMED_GPU, _ASSUMED_GPU_BYTES = "H200", 141 * 10**9
# Number format -> instruction sets of CPUs, one of which multiplies in it.
_PRODUCTS = {"bfloat16": {"AVX512_BF16"}, "int8": {"AVX512_VNNI", "AVX_VNNI"}}
# Measured on the demo and on `bench engine`, AVX-512 and two cores: 1.3 to 1.4.
_SLOW_KERNELS = (
    "no compiled kernels for this CPU: about 1.3 times slower. A C compiler, such as gcc, builds them when lorabatch "
    "is installed again: pip install --force-reinstall --no-deps CHECKOUT"
)


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one engine: the machine's CPU, or the GPUs of the engine's processes."""

    #: `cpu` or `cuda`.
    kind: DeviceKind
    #: Name of the GPU with the least memory of the engine's GPUs; "CPU" for a CPU.
    name: str
    #: Memory of the GPU that `name` names, or of the machine for a CPU.
    memory_bytes: int
    #: A sentence that says why the device was assumed; "" for one that was found.
    assumption: str = ""
    #: Whether a CPU computes without the kernels that are compiled when lorabatch is installed.
    lacks_compiled_kernels: bool = False
    #: The CPU's instruction sets that kernels use (`kernels.cpu_instructions`).
    instructions: tuple[str, ...] = ()
    #: Number formats in which it multiplies, besides those in which every device of its kind does.
    products: tuple[str, ...] = ()
    #: Whether the machine was looked at and has no such device.
    is_missing: bool = False
    #: NVML ids of the engine's GPUs; empty for a CPU and for an assumed GPU.
    uuids: tuple[str, ...] = ()
    #: Number of workers whose engines use the GPU `shared_uuid`.
    num_sharing: int = 1
    #: Id of the GPU that the most workers have named; "" when none has named one.
    shared_uuid: str = ""
    #: Whether a GPU's kernels cannot be compiled, since Triton is not installed.
    lacks_triton: bool = False
    #: Machine of the device; None for an assumed one.
    host: Host | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user: missing compiled kernels, a GPU that several workers use."""
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
        """Name of the device for people; a CPU's with the vector instructions that kernels use."""
        has_vectors = self.instructions and self.instructions[0].startswith("AVX")
        return f"{self.name} with {self.instructions[0]}" if has_vectors else self.name


def device_kind(asked: str) -> DeviceKind:
    """`cpu` or `cuda`, as engines of this machine would choose."""
    if asked != "auto":
        return "cpu" if asked.partition(":")[0] == "cpu" else "cuda"
    return "cuda" if _NVIDIA_DRIVER.exists() else "cpu"


def find_device(asked: str, num_gpus: int = 1) -> Device:
    """The device of this machine's engines, as `--device` asks. An engine takes `num_gpus` GPUs, or all when the
    machine has fewer. Runs on workers too.
    """
    if device_kind(asked) == "cpu":
        has_none, instructions = lacks_compiled_kernels(), cpu_instructions()
        products = () if has_none else tuple(name for name, sets in _PRODUCTS.items() if sets & set(instructions))
        return Device("cpu", "CPU", total_host_bytes(), "", has_none, instructions, products, host=this_host())
    _, _, number = asked.partition(":")
    first = int(number) if number.isdecimal() else 0
    found = [gpu for place in range(first, first + num_gpus) if (gpu := _gpu(place)) is not None]
    if not found:
        return _assumed_gpu("no NVIDIA driver answers here", is_missing=first >= len(visible_gpus(os.environ)))
    least = min(found, key=lambda gpu: gpu.memory_bytes)
    return replace(least, uuids=tuple(uuid for gpu in found for uuid in gpu.uuids), host=this_host())


def find_device_of_workers(client: Client, asked: str, num_gpus: int = 1) -> Device:
    """The device of a cluster's workers; the one that `least_device` chooses when they differ. `num_gpus`: GPUs of an
    engine.
    """
    return least_device(devices_of_workers(client, asked, num_gpus).values(), asked)


def devices_of_workers(client: Client, asked: str, num_gpus: int = 1) -> dict[str, Device]:
    """Worker -> the device of its engine, for the workers of a cluster that answer in time."""
    try:
        replies: dict[str, Any] = client.sync(
            client._run, find_device, asked, num_gpus, on_error="return", callback_timeout=_ANSWER_LIMIT_S
        )
    except TimeoutError:
        logger.warning("some workers did not reply with their device within %.0f s", _ANSWER_LIMIT_S)
        replies = {}
    return {worker: reply for worker, reply in replies.items() if isinstance(reply, Device)}


def least_device(
    found: Iterable[Device], asked: str, reason: str = "no worker of the cluster has named its device"
) -> Device:
    """The weakest of the devices that workers have named: fewest GPUs, then least memory, then without compiled
    kernels. Its `shared_uuid` and `num_sharing` describe the GPU that the most workers have named. A device is assumed
    when `found` is empty; `reason` says why it is.
    """
    devices = sorted(
        found, key=lambda d: (bool(d.assumption), len(d.uuids), d.memory_bytes, not d.lacks_compiled_kernels)
    )
    if devices:
        times = Counter(uuid for device in devices for uuid in device.uuids).most_common(1)
        return replace(devices[0], shared_uuid=times[0][0], num_sharing=times[0][1]) if times else devices[0]
    if device_kind(asked) == "cuda":
        return _assumed_gpu(reason)
    here = find_device(asked)
    return Device(
        "cpu", here.name, here.memory_bytes, f"{reason}: a CPU with this machine's memory is assumed", host=here.host
    )


def _assumed_gpu(reason: str, *, is_missing: bool = False) -> Device:
    gigabytes = _ASSUMED_GPU_BYTES // 10**9
    assumption = f"{reason}: a GPU with the {gigabytes} GB of an {_ASSUMED_GPU} is assumed"
    return Device("cuda", _ASSUMED_GPU, _ASSUMED_GPU_BYTES, assumption, is_missing=is_missing)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu(place: int) -> Device | None:
    """The GPU with index `place` among those that this process may use, by NVML; None when NVML does not find it."""
    visible = visible_gpus(os.environ)
    if place >= len(visible):
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
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
        problem = problem or library.nvmlDeviceGetCudaComputeCapability(
            handle, ctypes.byref(major), ctypes.byref(minor)
        )
    finally:
        library.nvmlShutdown()
    if problem:
        return None
    shown = name.value.decode(errors="replace")
    products = ("fp8",) if (major.value, minor.value) >= FP8_CAPABILITY else ()
    uuids = (uuid.value.decode(errors="replace"),)
    return Device("cuda", shown, int(memory.total), lacks_triton=lacks_triton(), products=products, uuids=uuids)
