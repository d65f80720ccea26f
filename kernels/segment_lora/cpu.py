"""The compiled form of `add_lora_`, see `cpu.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..native import ADDRESS, COUNT, native_function

MAX_MEMBERS = 4
NativeLora = Callable[..., None]


class MemberRecord(ctypes.Structure):
    """`Member` of `cpu.c`."""

    _fields_ = (
        ("rank_start", COUNT),
        ("rank_end", COUNT),
        ("column_start", COUNT),
        ("column_end", COUNT),
        ("b", ADDRESS),
        ("scaling", ctypes.c_double),
    )


class SiteRecord(ctypes.Structure):
    """`Site` of `cpu.c`: one adapter at one packed layer. Valid as long as the tensors it names."""

    _fields_ = (("a", ADDRESS), ("rank", COUNT), ("num_members", COUNT), ("members", MemberRecord * MAX_MEMBERS))

    rank: int

    @classmethod
    def of(cls, a: Tensor, members: Sequence[tuple[int, int, int, int, Tensor, float]]) -> SiteRecord:
        """`members`: rank start and end, column start and end, B, scaling."""
        records = [MemberRecord(*places, b.data_ptr(), scaling) for *places, b, scaling in members]
        return cls(a.data_ptr(), a.shape[0], len(records), (MemberRecord * MAX_MEMBERS)(*records))


def native_lora() -> NativeLora | None:
    """The compiled function, or None."""
    return native_function("lora_add", ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, COUNT, ADDRESS, COUNT)


def add_lora_natively_(
    native: NativeLora, y: Tensor, x: Tensor, segments: Sequence[tuple[int, int, SiteRecord]]
) -> None:
    """`segments`: first row, end row, site; they must not overlap. x and y fp32, their rows dense."""
    if not segments:
        return
    table = np.array([(start, end, ctypes.addressof(site)) for start, end, site in segments], dtype=np.int64)
    stride = max(site.rank for _, _, site in segments)
    scratch = torch.empty(int(table[:, 1].max()), stride)
    native(
        y.data_ptr(),
        y.stride(0),
        x.data_ptr(),
        x.shape[1],
        table.ctypes.data,
        len(segments),
        scratch.data_ptr(),
        stride,
    )
