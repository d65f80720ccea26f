"""Records of a step's adapters, as compiled kernels read them (`segments.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import ADDRESS, COUNT, adapter_type

MAX_MEMBERS = 4


class MemberRecord(ctypes.Structure):
    """`Member` of `segments.h`."""

    _fields_ = (
        ("rank_start", COUNT),
        ("rank_end", COUNT),
        ("column_start", COUNT),
        ("column_end", COUNT),
        ("b", ADDRESS),
        ("scaling", ctypes.c_double),
    )


class SiteRecord(ctypes.Structure):
    """`Site` of `segments.h`: one adapter at one packed layer. Valid as long as the tensors it names."""

    _fields_ = (
        ("a", ADDRESS),
        ("num_bytes", COUNT),
        ("rank", COUNT),
        ("type", COUNT),
        ("num_members", COUNT),
        ("members", MemberRecord * MAX_MEMBERS),
    )

    num_bytes: int
    rank: int

    @classmethod
    def of(cls, a: Tensor, rank: int, members: Sequence[tuple[int, int, int, int, Tensor, float]]) -> SiteRecord:
        """The record of an adapter at one packed layer; `a` and each B are in panels.

        `members`: at most `MAX_MEMBERS`, each rank start and end, column start and end, B, scaling.
        """
        assert len(members) <= MAX_MEMBERS, f"{len(members)} members of a packed layer"
        records = [MemberRecord(*places, b.data_ptr(), scaling) for *places, b, scaling in members]
        depths = (a.numel() // rank, *(rank_end - rank_start for rank_start, rank_end, *_ in members))
        end = a.data_ptr() + a.nbytes
        for *_, b, _ in members:
            end += b.nbytes if b.data_ptr() == end else 0
        panels_type, num_bytes = adapter_type(a.dtype, depths), end - a.data_ptr()
        return cls(a.data_ptr(), num_bytes, rank, panels_type, len(records), (MemberRecord * MAX_MEMBERS)(*records))


#: Numbers of 8 bytes in a `SiteRecord`.
RECORD_NUMBERS = ctypes.sizeof(SiteRecord) // 8
_FIELDS = (*(name for name, _ in SiteRecord._fields_[:-1]), "members")
_OF_MEMBER = [name for name, _ in MemberRecord._fields_]
_ADDRESSES = [
    _FIELDS.index("a"),
    *(_FIELDS.index("members") + i * len(_OF_MEMBER) + _OF_MEMBER.index("b") for i in range(MAX_MEMBERS)),
]
_RANK = _FIELDS.index("rank")


def record_table(records: Sequence[SiteRecord | None]) -> NDArray[np.int64]:
    """The records' bytes, int64 [num_records, RECORD_NUMBERS]; zeros for None."""
    table = np.zeros((len(records), RECORD_NUMBERS), dtype=np.int64)
    for row, record in zip(table, records, strict=True):
        if record is not None:
            row[:] = np.frombuffer(bytes(record), dtype=np.int64)
    return table


def moved(table: NDArray[np.int64], num_bytes: int) -> NDArray[np.int64]:
    """A copy of a `record_table` whose matrices are `num_bytes` further on in memory."""
    table = table.copy()
    table[:, _ADDRESSES] += num_bytes
    return table


def addresses_and_ranks(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """The address and rank of each record of a `record_table`, [num_records, 2]; both 0 for an empty record. Valid as
    long as the table."""
    ranks = table[:, _RANK]
    addresses = table.ctypes.data + np.arange(len(table)) * (RECORD_NUMBERS * 8)
    return np.stack([np.where(ranks > 0, addresses, 0), ranks], axis=1)


class SiteSegments(NamedTuple):
    """The segments of a step at one packed layer, for one compiled call. Valid as long as the adapters it names."""

    #: Address of the `Segment` records, which are in the order of their rows and do not overlap.
    address: int
    #: Number of segments.
    num_segments: int
    #: Row at which the last segment ends.
    num_rows: int
    #: Largest rank of the segments' sites; 0 when no segment adds anything.
    largest_rank: int

    @property
    def record(self) -> ctypes.Array[ctypes.c_int64]:
        """The segments as compiled kernels read them, `Segments` of `segments.h`."""
        return (COUNT * 3)(self.address, self.num_segments, self.largest_rank)

    def num_scratch(self, in_features: int) -> int:
        """Numbers of scratch for the shrunk rows, and for the rows in bf16 when they are multiplied in bf16."""
        return self.num_rows * (self.largest_rank + -(-in_features // 2))


NO_SEGMENTS = SiteSegments(0, 0, 0, 0)
