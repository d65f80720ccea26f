"""Rows of one id, found among any number of rows: by hash, in as many files as keep each small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jobs.errors import JobRequestError
from ..jobs.store import JobStore
from . import prepared_rows as prepared
from .job_index import IndexedRows, read_row
from .scratch_file import ScratchFile

_IDS_SHOWN = 5
_PLACES_SHOWN = 3
_MAX_FILES = 256
_HASHED_ID = np.dtype([("id_hash", np.uint64), ("chunk", np.int32), ("batch", np.int32), ("row", np.int32)])


class DuplicateIds:
    """`file_rows`: about how many ids are looked at together, as long as that takes no more than 256 files."""

    def __init__(self, num_rows: int, file_rows: int) -> None:
        num_files = min(max(1, -(-num_rows // file_rows)), _MAX_FILES)
        self._files = [ScratchFile() for _ in range(num_files)]

    def __enter__(self) -> DuplicateIds:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def add(self, rows: IndexedRows) -> None:
        """Rows without an id (hash 0) have no double."""
        rows = rows[rows["id_hash"] != 0]
        found = np.empty(len(rows), _HASHED_ID)
        for name in _HASHED_ID.names or ():
            found[name] = rows[name]
        # The upper half of a hash, as a share of all there are: equal hashes meet in one file.
        number = (rows["id_hash"] >> np.uint64(32)) * np.uint64(len(self._files)) >> np.uint64(32)
        for i in np.unique(number):
            self._files[int(i)].write(found[number == i].tobytes())

    def refuse(self, store: JobStore, id_column: str) -> None:
        """Raise `JobRequestError`, naming examples and where they stand, when two rows have one id.

        Where hashes agree the ids themselves decide, so that no collision is taken for a duplicate.
        """
        examples: list[str] = []
        num_repeated = 0
        for group in self._groups():
            num_repeated += 1
            if len(examples) < _IDS_SHOWN:
                found = _repeated(store, group, id_column)
                num_repeated -= not found
                examples += found
        if examples:
            raise JobRequestError(
                f"column {id_column!r} (id): {num_repeated} ids stand in more than one row: "
                f"{'; '.join(examples[:_IDS_SHOWN])}. Every row needs an id of its own: make them unique, or name "
                "another column with --column id=NAME."
            )

    def _groups(self) -> Iterator[NDArray[np.void]]:
        """Groups of rows whose ids hash alike."""
        for file in self._files:
            rows = np.frombuffer(file.read(), _HASHED_ID)
            rows = rows[np.argsort(rows["id_hash"], kind="stable")]
            starts = np.flatnonzero(np.append(True, rows["id_hash"][1:] != rows["id_hash"][:-1]))[: len(rows)]
            ends = np.append(starts[1:], len(rows))
            is_long = ends - starts > 1
            for start, end in zip(starts[is_long], ends[is_long], strict=True):
                yield rows[start:end]


def _repeated(store: JobStore, group: NDArray[np.void], id_column: str) -> list[str]:
    places: defaultdict[Any, list[str]] = defaultdict(list)
    for hashed in group:
        row = read_row(store, hashed, (id_column, prepared.LOCATION))
        places[row[id_column]].append(row[prepared.LOCATION])
    return [f"{row_id!r} at {', '.join(found[:_PLACES_SHOWN])}" for row_id, found in places.items() if len(found) > 1]
