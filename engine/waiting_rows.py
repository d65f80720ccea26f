"""Rows handed to the engine that hold no pages yet, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence


class WaitingRows:
    """An ordered set of sequences: cheap to append to, to take from anywhere, and to see as arrays."""

    def __init__(self) -> None:
        self._rows: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._rows.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def append(self, sequence: Sequence) -> None:
        """Add at the end. Request ids are unique among unfinished rows."""
        assert sequence.request.request_id not in self._rows, f"row {sequence.request.request_id} waits already"
        self._rows[sequence.request.request_id] = sequence

    def remove(self, request_id: str) -> Sequence:
        """Take a row out. Raises KeyError when it does not wait."""
        return self._rows.pop(request_id)

    def adapter_codes(self, code_of: dict[str | None, int]) -> NDArray[np.int32]:
        """Adapter of every row as an integer, [num_waiting], in order of arrival."""
        return np.fromiter((code_of[s.request.adapter_id] for s in self), np.int32, len(self))

    def first_positions(self) -> dict[str, float]:
        """For each adapter, the position of its first row: when it is needed next."""
        positions: dict[str, float] = {}
        for position, sequence in enumerate(self):
            adapter_id = sequence.request.adapter_id
            if adapter_id is not None:
                positions.setdefault(adapter_id, position)
        return positions
