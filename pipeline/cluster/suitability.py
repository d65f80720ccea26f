"""Checks that a job's engines can do what its options ask of their device, before anything of the job starts.

On a local cluster the device is this machine's; on a running one it is what its workers report. Where no worker
reports, and for a cluster that the job starts from a class, the device is not known, and a plan says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from distributed import Client

from ...engine.config import TRITON_IS_MISSING, format_problem
from ...jobs.errors import JobError, JobRequestError, StorageError
from ...jobs.opening.validation import check_job
from ...jobs.spec import JobSpec
from ...jobs.store import JobStore
from .class_cluster import class_problems
from .devices import Device, devices_of_workers, find_device
from .worker_process import VISIBLE_DEVICES

_Connect = Callable[[JobSpec, Client | None], AbstractContextManager[Client]]


def check_suitability(spec: JobSpec, connect: _Connect, client: Client | None = None, *, is_plan: bool = False) -> None:
    """Raise `JobRequestError` for what the job's engines cannot do, together with the other problems of the job.

    A job that is done needs no engines. Workers of a running cluster are asked only if an option may be beyond them.
    `connect`: `connected`, which makes a client of the job's cluster. `is_plan`: nothing will be started, so that a
    cluster class need not be installed.
    """
    if client is None and spec.is_cluster_class:
        problems = class_problems(spec, is_installed=not is_plan)
    elif client is None and spec.is_embedded:
        problems = device_problems(spec, [find_device(spec.device, spec.tensor_parallel)])
    elif _demands(spec) and not _is_done(spec):
        with connect(spec, client) as own:
            problems = device_problems(spec, devices_of_workers(own, spec.device, spec.tensor_parallel).values())
    else:
        return
    if not problems or _is_done(spec):
        return
    try:
        check_job(spec)
    except JobError as error:
        problems += error.problems if isinstance(error, JobRequestError) else [str(error)]
    raise JobRequestError(*dict.fromkeys(problems))


def _is_done(spec: JobSpec) -> bool:
    """Whether the output holds a job that is done and is not to be started over or updated."""
    with suppress(StorageError):
        return not (spec.overwrite or spec.update) and JobStore(spec.output, spec.storage_options).is_finished()
    return False


def device_problems(spec: JobSpec, devices: Iterable[Device]) -> list[str]:
    """Options of the job that its engines' devices cannot serve, as sentences with the number of workers that cannot.
    Assumed devices have no problems.
    """
    counted = Counter(_problem(spec, device) for device in devices)
    num_workers = counted.total()
    return [
        f"{problem} {count} of {num_workers} workers cannot." if num_workers > 1 else problem
        for problem, count in counted.items()
        if problem
    ]


def unknown_note(spec: JobSpec, device: Device) -> tuple[str, ...]:
    """A sentence about options that an assumed device may not be able to serve; none for a device that was found."""
    asked = [f"{name} {value}" for name, value in _demands(spec).items() if name != "device"]
    if not device.assumption or not asked:
        return ()
    return (f"whether the workers can serve {', '.join(asked)} is not known before they are there",)


def _demands(spec: JobSpec) -> dict[str, str]:
    """Options, with their values, that not every device can serve."""
    asked = {"device": spec.device, "dtype": spec.dtype, "base_quantization": spec.base_quantization}
    return {name: value for name, value in asked.items() if value not in ("auto", "cpu", "float32", "none")}


def _problem(spec: JobSpec, device: Device) -> str:
    if device.is_missing:
        return (
            f"device={spec.device!r}: no such NVIDIA GPU is shown by the machine (/dev/nvidia*, {VISIBLE_DEVICES}). "
            "Use device cpu, or name a cluster whose workers have GPUs."
        )
    if device.assumption:
        return ""
    if device.lacks_triton:
        return f"device={spec.device!r}: {TRITON_IS_MISSING}."
    return format_problem(device.kind, spec.dtype, spec.base_quantization, device.products, device.name)
