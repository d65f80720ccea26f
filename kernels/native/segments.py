"""Records of a step's adapters, as compiled kernels read them (`segments.h`)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from . import COUNT

MAX_MEMBERS = 4
#: `Piece` of `segments.h`: panels of a matrix that lie side by side.
PIECE = np.dtype([("end", np.int64), ("numbers", np.int64)])
#: `Run` of `segments.h`: memory that is read from its first byte to its last.
RUN = np.dtype([("start", np.int64), ("num_bytes", np.int64)])
# `Member` of `segments.h`.
_MEMBER = [
    ("rank_start", np.int64),
    ("rank_end", np.int64),
    ("column_start", np.int64),
    ("column_end", np.int64),
    ("b", np.int64),
    ("scaling", np.float64),
]
#: `Site` of `segments.h`: one adapter at one packed layer; zeros where it leaves the layer alone.
SITE = np.dtype(
    [
        ("a", np.int64),
        ("runs", np.int64),
        ("num_runs", np.int64),
        ("num_bytes", np.int64),
        ("rank", np.int64),
        ("type", np.int64),
        ("num_members", np.int64),
        ("members", _MEMBER, MAX_MEMBERS),
    ]
)


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
