"""Rows that no engine will see: counted by kind, with the first of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jobs.error_budget import ErrorBudget
from ..jobs.errors import ErrorBudgetError
from ..jobs.store import JobStore
from . import prepared_rows as prepared
from .job_index import IndexedRows, read_row
from .row_checks import ErrorKind

ADAPTER_ERROR = "adapter"


@dataclass(frozen=True, slots=True)
class KindOfError:
    """Rows with one kind of error, and the first of them: its place and its sentence."""

    kind: str
    num_rows: int
    location: str
    sentence: str


class RowErrors:
    """`problems`: what is wrong with each adapter, by its code; None where nothing is."""

    def __init__(self, problems: Sequence[str | None]) -> None:
        self._problems = problems
        # One entry more than there are adapters: code -1, the base model, reads the last.
        self._is_bad = np.array([problem is not None for problem in problems] + [False])
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Any] = {}

    def add(self, rows: IndexedRows) -> None:
        """Rows in input order."""
        for kind in ErrorKind:
            if kind:
                self._count(kind.name.lower(), rows[rows["error_kind"] == kind])
        # A row that the index has rejected already is not counted again.
        self._count(ADAPTER_ERROR, rows[self._is_bad[rows["adapter"]] & (rows["error_kind"] == 0)])

    def is_error(self, rows: IndexedRows) -> NDArray[np.bool_]:
        """Which rows, bool `[len(rows)]`."""
        return np.asarray((rows["error_kind"] != 0) | self._is_bad[rows["adapter"]])

    def kinds(self, store: JobStore) -> tuple[KindOfError, ...]:
        """Those that were met."""
        names = [*(kind.name.lower() for kind in ErrorKind), ADAPTER_ERROR]
        return tuple(self._kind(name, store) for name in names if name in self._first)

    def _count(self, name: str, rows: IndexedRows) -> None:
        if len(rows):
            self._counts[name] += len(rows)
            self._first.setdefault(name, rows[0].copy())

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
