"""Launches Triton kernels, and decides with how many programs and in which order. No Triton is imported here.

`LORABATCH_PDL`, `LORABATCH_SIDE_STREAM` and `LORABATCH_TUNING` are read once in a process, as Triton reads variables of
its own: compiled code depends on them, here and in processes that compile ahead, and no caller of an operator has a say
in them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from .interpreted import fix_masks

# The interpreter runs programs one after the other: two show that work is shared out, more would only be slow.
_INTERPRETED_PROGRAMS = 2
#: Environment variables by which kernels are compiled to other code.
COMPILE_VARIABLES = ("LORABATCH_PDL", "LORABATCH_TUNING")
# Compute capability of the first GPUs with programmatic dependent launch.
_PDL_CAPABILITY = 90


@cache
def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter (on CPU tensors), as the tests do."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def mend_interpreter() -> None:
    """Make Triton's interpreter take masks as compilers do, if it runs the kernels: before a launch by Triton's own
    means."""
    if is_interpreted():
        fix_masks()


def num_persistent_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs of a persistent grid: all are resident at once and share the work listed in device memory.

    The grid depends on the device alone, never on the step, so that a captured graph serves any step.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _num_multiprocessors(device.index or 0) * per_multiprocessor


def num_warps_for(num_sums: int, per_thread: int, fewest: int) -> int:
    """Warps of a program that holds `num_sums` fp32 sums, `per_thread` (a power of 2) of them in each of a warp's 32
    threads. A thread has 255 registers at most: a tile of 64 rows takes four times the threads of one of 16, else sums
    would spill to memory."""
    return min(max(num_sums // (32 * per_thread), fewest), 16)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def is_exact_dot(dtype: torch.dtype) -> bool:
    """Whether `tl.dot` takes fp32 operands in full precision.

    It must for fp32 weights (TF32 keeps 10 bits of mantissa), and it does in the interpreter, whose bf16 products are
    wrong.
    """
    return dtype == torch.float32 or is_interpreted()


def few_rows_of(limit: int, tile_rows: int) -> int:
    """Rows of a tile, at most `limit`, up to which it is computed row by row: none in tiles of prompts, which are
    mostly full, and none on GPUs before Hopper, for which that takes more registers than a thread has."""
    has_registers = is_interpreted() or compile_capability() >= _PDL_CAPABILITY
    return limit if tile_rows < 64 and has_registers else 0


def most_registers(dtype: torch.dtype, num_programs: int) -> int | None:
    """The compiler's limit for a thread's registers, so that `num_programs` of 128 threads fit on a multiprocessor.

    None where products run on the ordinary cores, which need more.
    """
    return None if is_exact_dot(dtype) else 65536 // (128 * num_programs) // 8 * 8


def launch(kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
    """`kernel[(num_programs,)](*args, **constants)`, in a third of the host's time: 5 us instead of 14.

    Triton asks of every argument what code was specialised for, on every launch. Here that is a key of types, sizes and
    constants, and compiled code is called by Triton's own launcher, with addresses instead of tensors, of which it
    would ask the driver whether they are the device's. `constants` are the kernel's constants and the compiler's
    options, always the same names in the same order. The kernel's constant `PDL` is set here: see `uses_pdl`.
    """
    if (asked := tuning()) is not None:
        constants = asked.of(constants)
    if is_interpreted():
        mend_interpreter()
        kernel[num_programs,](*args, PDL=False, **constants)
        return
    launches = _LAUNCHES.get(id(kernel)) or _LAUNCHES.setdefault(id(kernel), _Launches(kernel))
    address_bits, parts, passed = 0, [*constants.values()], []
    for is_specialised, arg in zip(launches.is_specialised, args, strict=True):
        if isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            address_bits |= address
            parts.append(arg.dtype)
            passed.append(address)
        else:
            passed.append(arg)
            if is_specialised:
                parts.append(arg)
    is_aligned = address_bits % 16 == 0  # as compiled code may take for granted
    key = tuple(parts)
    code = launches.code.get(key) if is_aligned else None
    if code is not None and not launches.hooks():
        compiled, passed_constants = code
        stream = launches.driver.get_current_stream(launches.driver.get_current_device())
        compiled.run(
            num_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *passed, *passed_constants,
        )  # fmt: skip
        return
    options = {"PDL": True, "launch_pdl": True} if uses_pdl() else {"PDL": False}
    compiled = kernel[num_programs,](*args, **options, **constants)
    if is_aligned and compiled is not None:  # None: a hook of Triton's has noted the kernel instead
        of_kernel = options | constants
        launches.code[key] = compiled, [of_kernel[name] for name in launches.constants]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Changes to the constants with which all kernels are compiled, for comparisons."""

    #: Factor of the columns or depth of a tile.
    block: float = 1.0
    #: Factor of the warps; a program keeps its number of registers.
    warps: float = 1.0
    #: Stages added to a pipelined loop.
    stages: int = 0
    #: Most rows of a tile that are computed one by one; None: as kernels ask.
    rows: int | None = None

    @classmethod
    def parse(cls, asked: str) -> Tuning:
        """The tuning of a text such as `block=2,warps=0.5,stages=-1,rows=0`. Raises ValueError for another form."""
        try:
            pairs = dict(part.split("=") for part in asked.split(","))
            numbers = {name: (int if name in ("stages", "rows") else float)(value) for name, value in pairs.items()}
            if all(isinstance(number, int) or math.log2(number).is_integer() for number in numbers.values()):
                return cls(**numbers)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            pass
        raise ValueError(
            f"LORABATCH_TUNING={asked}: expected powers of 2 and whole numbers, as in "
            "block=2,warps=0.5,stages=-1,rows=0"
        )

    def of(self, constants: Mapping[str, Any]) -> dict[str, Any]:
        """The changed constants of a launch. A tensor core's least side is 16; a thread has at most 255 registers."""
        tuned = dict(constants)
        for name in tuned.keys() & {"BLOCK_N", "BLOCK_K"}:
            tuned[name] = max(int(tuned[name] * self.block), 16)
        if self.rows is not None and tuned.get("FEW_ROWS"):
            tuned["FEW_ROWS"] = self.rows
        if "num_stages" in tuned:
            tuned["num_stages"] = max(tuned["num_stages"] + self.stages, 1)
        if "num_warps" in tuned:
            tuned["num_warps"] = min(max(int(tuned["num_warps"] * self.warps), 1), 16)
            if tuned.get("maxnreg"):
                registers = tuned["maxnreg"] * constants["num_warps"] // tuned["num_warps"]
                tuned["maxnreg"] = min(registers // 8 * 8, 255)
        return tuned


@cache
def tuning() -> Tuning | None:
    """The tuning that `LORABATCH_TUNING` asks of this process; None if it is not set.

    Raises:
        ValueError: the variable has another form than `Tuning.parse` reads.
    """
    asked = os.environ.get("LORABATCH_TUNING", "")
    return Tuning.parse(asked) if asked else None


class _Launches:
    """The data for launches of one kernel. `is_specialised`: whether code depends on each argument. `constants`: names
    of the constants in the kernel's order. `code`: types, sizes and constants of a launch -> compiled code and its
    constants."""

    def __init__(self, kernel: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._kernel = kernel  # its address is a key
        self._runtime = knobs.runtime
        self.driver = driver.active
        self.is_specialised = [not p.do_not_specialize for p in kernel.params if not p.is_constexpr]
        self.constants = [p.name for p in kernel.params if p.is_constexpr]
        self.code: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def hooks(self) -> bool:
        """Whether a profiler of Triton's is called at launches."""
        return bool(self._runtime.launch_enter_hook.calls or self._runtime.launch_exit_hook.calls)


_LAUNCHES: dict[int, _Launches] = {}


@cache
def uses_pdl() -> bool:
    """Whether a kernel is launched before its predecessor has ended (programmatic dependent launch): with
    LORABATCH_PDL=1 on GPUs of compute capability 9.0 and later. The kernel itself waits for its predecessor, with
    `gdc_wait`, before it reads its results."""
    return (
        os.environ.get("LORABATCH_PDL", "0") == "1" and not is_interpreted() and compile_capability() >= _PDL_CAPABILITY
    )


@cache
def compile_capability() -> int:
    """Compute capability of the GPU that Triton compiles for: 90 is 9.0. 0 in the interpreter."""
    if is_interpreted():
        return 0
    from triton.runtime import driver

    return int(driver.active.get_current_target().arch)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Lets kernels launched in the block run beside kernels launched after it; the yielded function joins the two.

    Only in a graph that is being captured: launched one by one, small kernels end before the host has launched the
    next, and a fork would cost the host more than it saves. Does nothing with LORABATCH_SIDE_STREAM=0, for comparisons,
    or when kernels are launched early (`uses_pdl`): a kernel that waits for two others cannot be.
    """
    if device.type != "cuda" or not has_side_stream() or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@cache
def has_side_stream() -> bool:
    """Whether `beside` forks."""
    return os.environ.get("LORABATCH_SIDE_STREAM", "1") != "0" and not uses_pdl()


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`, copied from the host through pinned memory, so that the host does not wait."""
    if values.device == device:
        return values
    assert values.device.type == "cpu", f"values are on {values.device}, wanted on {device}"
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def empty_pinned(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory for copies to and from `device`.

    For a GPU it is pinned, so that the host does not wait for copies (torch reuses it once they are done). For a CPU it
    comes from numpy, which asks the system for huge pages: filling it takes a third of the time.
    """
    if device.type == "cuda":
        return torch.empty(length, dtype=dtype, pin_memory=True)
    # at least one number: torch cannot view nothing as another dtype
    return torch.from_numpy(np.empty(max(length, 1) * dtype.itemsize, np.uint8)).view(dtype)[:length]


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
