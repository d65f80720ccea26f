"""Finds rows that share an id (`DuplicateIds`) and counts rows that no engine will see (`RowErrors`).

Ids are compared by hash, in as many files as keep each of them small, so that any number of rows can be checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...jobs.errors import ErrorBudgetError, InputRowsError
from ...jobs.options.values import ErrorBudget
from ...jobs.outcome import KindOfError
from ...jobs.store import JobStore
from ..dataset import schema as prepared
from ..dataset.row_checks import ErrorKind
from .external_sort import IndexedRows, ScratchFile, read_row

IDS_SHOWN = 5
_PLACES_SHOWN = 3
_MAX_FILES = 256
_HASHED_ID = np.dtype(
    [("id_hash", np.uint64), ("chunk", np.int32), ("place", np.int32), ("batch", np.int32), ("row", np.int32)]
)


class DuplicateIds:
    """Finds rows that share an id. Hashes of ids are kept in files, each of which is sorted in memory.

    `file_rows`: about the number of ids in a file, as long as that takes no more than 256 files.
    """

    def __init__(self, num_rows: int, file_rows: int) -> None:
        num_files = min(max(1, -(-num_rows // file_rows)), _MAX_FILES)
        self._files = [ScratchFile() for _ in range(num_files)]

    def __enter__(self) -> DuplicateIds:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def add(self, rows: IndexedRows) -> None:
        """Add rows. Rows without an id (hash 0) are left out: they have no duplicates."""
        rows = rows[rows["id_hash"] != 0]
        found = np.empty(len(rows), _HASHED_ID)
        for name in _HASHED_ID.names or ():
            found[name] = rows[name]
        # A file has a range of the hashes' upper halves, so that equal hashes are in one file.
        number = (rows["id_hash"] >> np.uint64(32)) * np.uint64(len(self._files)) >> np.uint64(32)
        for i in np.unique(number):
            self._files[int(i)].write(found[number == i].tobytes())

    def refuse(self, store: JobStore, id_column: str, *, is_from_content: bool = False) -> None:
        """Raise `InputRowsError`, naming examples and their places, when two rows have one id.

        Ids with equal hashes are compared themselves, so that no collision is taken for a duplicate.
        """
        examples: list[str] = []
        num_repeated = 0
        for group in self._groups():
            num_repeated += 1
            if len(examples) < IDS_SHOWN:
                found = _repeated(store, group, id_column)
                num_repeated -= not found
                examples += found
        if examples and is_from_content:
            raise _equal_rows(num_repeated, examples[:IDS_SHOWN])
        if examples:
            raise double_ids(id_column, num_repeated, examples[:IDS_SHOWN])

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


def double_ids(id_column: str, num_repeated: int, examples: Sequence[str]) -> InputRowsError:
    """The error that refuses several rows with one id. `examples`: texts of an id and its places."""
    ids = "1 id appears" if num_repeated == 1 else f"{num_repeated} ids appear"
    return InputRowsError(
        f"column {id_column!r} (id): {ids} in more than one row: {'; '.join(examples)}. Every row needs an id of its "
        "own: make them unique, or name another column with --column id=NAME."
    )


def _equal_rows(num_repeated: int, examples: Sequence[str]) -> InputRowsError:
    """The error that refuses rows whose ids are made of equal content."""
    return InputRowsError(
        f"id_from_content: {num_repeated} ids have more than one row, with one adapter, prompt and settings: "
        f"{'; '.join(examples)}. Leave out all but one of each, ask for several answers with --n, or give every row an "
        "id of its own in a column, and name it with --column id=NAME."
    )


def id_example(row_id: Any, places: Sequence[str]) -> str:
    """A text of an id and some of the places of its rows."""
    return f"{row_id!r} at {', '.join(places[:_PLACES_SHOWN])}"


def _repeated(store: JobStore, group: NDArray[np.void], id_column: str) -> list[str]:
    places: defaultdict[Any, list[str]] = defaultdict(list)
    for hashed in np.sort(group, order=("chunk", "place")):
        row = read_row(store, hashed, (id_column, prepared.LOCATION))
        places[row[id_column]].append(row[prepared.LOCATION])
    return [id_example(row_id, found) for row_id, found in places.items() if len(found) > 1]


ADAPTER_ERROR = "adapter"


class RowErrors:
    """Counts rows that no engine will see, by kind. `problems`: problem of each adapter by its code; None for an
    adapter that can serve rows.
    """

    def __init__(self, problems: Sequence[str | None]) -> None:
        self._problems = problems
        # One entry more than there are adapters: code -1, the base model, reads the last entry.
        self._is_bad = np.array([problem is not None for problem in problems] + [False])
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Any] = {}

    def add(self, rows: IndexedRows) -> None:
        """Count the errors of rows, which are added in input order."""
        for kind in ErrorKind:
            if kind:
                self._count(kind.name.lower(), rows[rows["error_kind"] == kind])
        # A row that the index has rejected already is not counted again.
        self._count(ADAPTER_ERROR, rows[self._is_bad[rows["adapter"]] & (rows["error_kind"] == 0)])

    def is_error(self, rows: IndexedRows) -> NDArray[np.bool_]:
        """Whether each row is an error row, bool `[len(rows)]`."""
        return np.asarray((rows["error_kind"] != 0) | self._is_bad[rows["adapter"]])

    def kinds(self, store: JobStore) -> tuple[KindOfError, ...]:
        """Kinds of errors that rows have, with the number of rows and the first row of each."""
        names = [*(kind.name.lower() for kind in ErrorKind), ADAPTER_ERROR]
        return tuple(self._kind(name, store) for name in names if name in self._first)

    def _count(self, name: str, rows: IndexedRows) -> None:
        if len(rows):
            self._counts[name] += len(rows)
            self._first.setdefault(name, rows[np.argmin(rows["place"])].copy())

    def _kind(self, name: str, store: JobStore) -> KindOfError:
        row = self._first[name]
        found = read_row(store, row, (prepared.LOCATION, prepared.ERROR))
        sentence = (self._problems[row["adapter"]] or "") if name == ADAPTER_ERROR else found[prepared.ERROR]
        return KindOfError(name, self._counts[name], found[prepared.LOCATION], sentence)


def check_budget(budget: ErrorBudget, errors: Sequence[KindOfError], num_rows: int) -> None:
    """Raise `ErrorBudgetError` when more rows are wrong than `budget` allows."""
    num_errors = sum(kind.num_rows for kind in errors)
    if budget.allows(num_errors, num_rows):
        return
    kinds = "; ".join(f"{k.num_rows} x {k.kind}, first at {k.location}: {k.sentence}" for k in errors)
    raise ErrorBudgetError(
        f"max_errors={budget}: {num_errors} of {num_rows} rows cannot be answered, {budget.limit(num_rows)} are "
        f"allowed ({kinds}) Nothing was run. Correct these rows, or raise --max-errors to run the others."
    )
