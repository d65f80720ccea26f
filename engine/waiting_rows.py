"""Rows handed to the engine that hold no pages yet, in order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .sequence import Sequence


class WaitingRows:
    """An ordered set of sequences: cheap to append to, to take from anywhere, and to see as arrays."""

    def __init__(self) -> None:
        self._rows: dict[str, Sequence] = {}
        self._num_of: Counter[str] = Counter()
        self._capacity_tokens: dict[str, int] = {}

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
        self._capacity_tokens[sequence.request.request_id] = sequence.capacity_tokens
        if sequence.request.adapter_id is not None:
            self._num_of[sequence.request.adapter_id] += 1

    def remove(self, request_id: str) -> Sequence:
        """Take a row out. Raises KeyError when it does not wait."""
        sequence = self._rows.pop(request_id)
        del self._capacity_tokens[request_id]
        adapter_id = sequence.request.adapter_id
        if adapter_id is not None:
            self._num_of[adapter_id] -= 1
            if not self._num_of[adapter_id]:
                del self._num_of[adapter_id]
        return sequence

    def wants(self, adapter_id: str) -> bool:
        """Whether a row of the adapter waits."""
        return adapter_id in self._num_of

    def adapter_codes(self, code_of: dict[str | None, int]) -> NDArray[np.int32]:
        """Adapter of every row as an integer, [num_waiting], in order of arrival."""
        return np.fromiter((code_of[s.request.adapter_id] for s in self), np.int32, len(self))

    @property
    def adapter_ids(self) -> Collection[str]:
        """Adapters that rows wait with."""
        return self._num_of.keys()

    def capacity_tokens(self) -> NDArray[np.int64]:
        """`Sequence.capacity_tokens` of every row, [num_waiting], in order of arrival."""
        return np.fromiter(self._capacity_tokens.values(), np.int64, len(self))

    def next_uses(
        self, running_ids: Collection[str | None], resident_ids: Collection[str], code_of: Mapping[str | None, int]
    ) -> dict[str, float]:
        """For each adapter, how many rows enter before its first, soonest first: the order of
        `scheduler.batching.clustered_order`."""

        def place(adapter_id: str) -> tuple[int, int, int]:
            distance = 0 if adapter_id in running_ids else 1 if adapter_id in resident_ids else 2
            return distance, -self._num_of[adapter_id], code_of[adapter_id]

        order = sorted(self._num_of, key=place)
        starts = accumulate((self._num_of[a] for a in order), initial=0)
        return {a: float(start) for a, start in zip(order, starts, strict=False)}
