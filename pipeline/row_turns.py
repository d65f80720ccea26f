"""Rows that wait for an engine, by the run they belong to, and whose turn it is. Pure bookkeeping.

Runs that share an engine get equal service, counted in tokens: the next row is one of the run that was served least
(the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4). Rows in
the engine count as if they generated all of `max_tokens`, finished ones as what they were. A run that had nothing to
do starts level with the one served least: what it did not use is not saved up.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.exported_row import ExportedRow

# One generated token counts as much as two of a prompt (the paper's weights).
_OUTPUT_WEIGHT = 2.0


class RowTurns:
    """What waits of each run, in order, and how much of the engine each run has had."""

    def __init__(self) -> None:
        # Run -> insertion-ordered set of request ids; a run without waiting rows has no entry.
        self._waiting: dict[str, dict[str, None]] = {}
        # Run -> unfinished rows here, wherever they are; a run without any has no entry.
        self._num_rows: dict[str, int] = {}
        # Run -> tokens of its finished rows; kept while a run has nothing to do.
        self._served: dict[str, float] = {}
        # Row in the engine -> tokens it may take; and their sum by run.
        self._reserved: dict[str, float] = {}
        self._reserved_by: dict[str, float] = {}

    @property
    def num_runs(self) -> int:
        """Runs with unfinished rows here."""
        return len(self._num_rows)

    def waiting(self) -> list[str]:
        """All rows that wait."""
        return [request_id for waiting in self._waiting.values() for request_id in waiting]

    def arrived(self, run: str, request_ids: Iterable[str]) -> None:
        """New rows of a run wait behind its others."""
        new = dict.fromkeys(request_ids)
        if new and run not in self._num_rows:
            least = min((self._served[other] for other in self._num_rows), default=0.0)
            self._served[run] = max(least, self._served.get(run, 0.0))
        if new:
            self._num_rows[run] = self._num_rows.get(run, 0) + len(new)
            self._waiting.setdefault(run, {}).update(new)

    def back(self, run: str, request_ids: Iterable[str]) -> None:
        """Rows have left the engine unfinished and wait again, before others of their run."""
        ids = list(request_ids)
        for request_id in ids:
            self._unreserve(run, request_id)
        if ids:
            self._waiting[run] = dict.fromkeys(ids) | self._waiting.get(run, {})

    def away(self, run: str, request_id: str) -> None:
        """A row has left the engine and does not wait here: it is lent, or a suspect."""
        self._unreserve(run, request_id)

    def gone(self, run: str, request_id: str, row: ExportedRow, output_tokens: int) -> None:
        """A row is finished, with so many tokens in all, or nobody wants it any more (0)."""
        if request_id in self._reserved and output_tokens:
            begun = len(row.token_ids)
            self._served[run] += len(row.request.prompt_token_ids) + begun + _OUTPUT_WEIGHT * (output_tokens - begun)
        self._unreserve(run, request_id)
        waiting = self._waiting.get(run, {})
        waiting.pop(request_id, None)
        if not waiting:
            self._waiting.pop(run, None)
        self._num_rows[run] -= 1
        if not self._num_rows[run]:
            del self._num_rows[run]

    def enter(self, run: str, request_id: str, row: ExportedRow) -> None:
        """A row goes to the engine."""
        begun, sampling = len(row.token_ids), row.request.sampling
        tokens = len(row.request.prompt_token_ids) + begun + _OUTPUT_WEIGHT * (sampling.max_tokens - begun)
        self._reserved[request_id] = tokens
        self._reserved_by[run] = self._reserved_by.get(run, 0.0) + tokens

    def next(self) -> tuple[str, str] | None:
        """Take out the row whose turn it is: its run and its id; None when nothing waits."""
        if not self._waiting:
            return None
        run = min(self._waiting, key=lambda run: (self._served[run] + self._reserved_by.get(run, 0.0), run))
        waiting = self._waiting[run]
        request_id = next(iter(waiting))
        del waiting[request_id]
        if not waiting:
            del self._waiting[run]
        return run, request_id

    def forget(self, run: str) -> None:
        """A run is over. Its rows must be gone."""
        assert run not in self._num_rows, f"run {run} has {self._num_rows[run]} rows left"
        self._served.pop(run, None)

    def _unreserve(self, run: str, request_id: str) -> None:
        tokens = self._reserved.pop(request_id, None)
        if tokens is not None:
            self._reserved_by[run] -= tokens
            if self._reserved_by[run] <= 0.0:
                del self._reserved_by[run]
