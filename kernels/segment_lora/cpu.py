"""The compiled form of `add_lora_`, see `cpu.c`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

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
    """`segments`: first row, end row, site; in the order of their rows, none over another. x and y fp32, dense."""
    if not segments:
        return
    # numpy would take as long as all of the rest: this is called for every packed layer of every step
    table = array("q", [field for start, end, site in segments for field in (start, end, ctypes.addressof(site))])
    stride = max([site.rank for _, _, site in segments])
    scratch = torch.empty(segments[-1][1], stride)
    address, _ = table.buffer_info()
    native(y.data_ptr(), y.shape[1], x.data_ptr(), x.shape[1], address, len(segments), scratch.data_ptr(), stride)
