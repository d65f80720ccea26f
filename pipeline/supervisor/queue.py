"""Which rows an engine process works on, which wait, and what a crash means for them.

A crash says little about the rows that were in the process: most often they are innocent. So rows go back in
after their first crash. Rows that saw two crashes are *suspects*: they run in groups with nothing else in the
process, and a group that crashes is halved until single rows are left. A row that crashes the process alone,
twice, is given up; every other row is cleared by finishing. Pure bookkeeping: no process, no clock.

Rows that wait for an engine, by the run they belong to, and whose turn it is. Pure bookkeeping.

Runs that share an engine get equal service, counted in tokens: the next row is one of the run that was served least
(the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4). Rows in
the engine count as if they generated all of `max_tokens`, finished ones as what they were. A run that had nothing to
do starts level with the one served least: what it did not use is not saved up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...engine.request import ExportedRow

CRASHES_TO_SUSPECT = 2
CRASHES_ALONE_TO_GIVE_UP = 2


@dataclass(slots=True)
class LedgerRow:
    """One unfinished row of a run, with the tokens it brought along, and what it has been through."""

    row: ExportedRow
    run: str = ""
    crashes: int = 0
    crashes_alone: int = 0


class RowLedger:
    """Unfinished rows of one engine process. `take` what to send next, say what `finished` and `crashed`.

    Rows belong to runs, which take turns (`row_turns.py`). Rows that another engine works on for this one are *lent*:
    nothing that happens here touches them.
    """

    def __init__(self) -> None:
        self._rows: dict[str, LedgerRow] = {}
        self._turns = RowTurns()
        # Insertion-ordered sets of request ids.
        self._in_engine: dict[str, None] = {}
        self._lent: dict[str, None] = {}
        self._suspect_groups: deque[list[str]] = deque()
        self._is_isolating = False

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def num_in_engine(self) -> int:
        """Rows sent to the process and not finished."""
        return len(self._in_engine)

    @property
    def is_searching(self) -> bool:
        """Whether suspects are in the process, with nothing else: its death would leave fewer of them."""
        return self._is_isolating and bool(self._in_engine)

    @property
    def lent(self) -> Collection[str]:
        """Request ids of rows that another engine works on."""
        return self._lent.keys()

    @property
    def num_runs(self) -> int:
        """Runs with unfinished rows."""
        return self._turns.num_runs

    def in_engine_by_run(self) -> Counter[str]:
        """Rows in the process, by run."""
        return Counter(self._rows[request_id].run for request_id in self._in_engine)

    def begun(self, request_ids: Iterable[str]) -> list[ExportedRow]:
        """Those of these rows that are unfinished and brought tokens along when they last left an engine."""
        rows = (self._rows[request_id].row for request_id in request_ids if request_id in self._rows)
        return [row for row in rows if row.token_ids]

    def crashes_of(self, request_id: str) -> int:
        """Crashes an unfinished row has been through."""
        return self._rows[request_id].crashes

    def add(self, rows: Iterable[ExportedRow], run: str = "") -> None:
        """New rows of a run wait to be sent."""
        new: dict[str, LedgerRow] = {}
        for row in rows:
            request_id = row.request.request_id
            assert request_id not in self._rows, f"{request_id} is in the ledger already"
            new[request_id] = LedgerRow(row, run)
        self._rows |= new
        self._turns.arrived(run, new)

    def lendable(self, request_ids: Iterable[str], num_rows: int) -> list[str]:
        """The last of these rows that are in the process and above suspicion: they have most of their way to go."""
        if self._is_isolating:
            return []
        found = [r for r in request_ids if r in self._in_engine and not self._rows[r].crashes]
        return found[max(0, len(found) - num_rows) :]

    def lend(self, rows: Iterable[ExportedRow]) -> list[ExportedRow]:
        """The process has given these rows up; those that somebody still waits for are lent from now on."""
        lent = [row for row in rows if row.request.request_id in self._in_engine]
        for row in lent:
            request_id = row.request.request_id
            del self._in_engine[request_id]
            self._rows[request_id].row = row
            self._turns.away(self._rows[request_id].run, request_id)
            self._lent[request_id] = None
        return lent

    def returned(self, rows: Iterable[ExportedRow]) -> None:
        """Lent rows wait again with the tokens they bring."""
        back = [row for row in rows if row.request.request_id in self._lent]
        for row in back:
            self._rows[row.request.request_id].row = row
        self.reclaim(row.request.request_id for row in back)

    def reclaim(self, request_ids: Iterable[str]) -> None:
        """Lent rows wait again, before others, with the tokens they had when they left."""
        back = [request_id for request_id in request_ids if request_id in self._lent]
        for request_id in back:
            del self._lent[request_id]
        self._wait_again(back)

    def _wait_again(self, request_ids: Iterable[str]) -> None:
        """Rows wait before others of their run."""
        by_run: dict[str, list[str]] = {}
        for request_id in request_ids:
            by_run.setdefault(self._rows[request_id].run, []).append(request_id)
        for run, ids in by_run.items():
            self._turns.back(run, ids)

    def take(self, window: int | None = None) -> list[ExportedRow]:
        """Rows to send now; they count as in the process from here on. `window`: as many as the process may have."""
        if self._is_isolating and self._in_engine:
            return []
        self._is_isolating = False
        group = self._next_suspects()
        if group and self._in_engine:
            return []
        if group:
            self._suspect_groups.popleft()
            self._is_isolating = True
            for request_id in group:
                self._enter(request_id)
        else:
            group = self._next_turns(window)
        return [self._rows[request_id].row for request_id in group]

    def _next_turns(self, window: int | None) -> list[str]:
        taken: list[str] = []
        while (window is None or len(self._in_engine) < window) and (turn := self._turns.next()) is not None:
            taken.append(turn[1])
            self._enter(turn[1])
        return taken

    def _enter(self, request_id: str) -> None:
        self._in_engine[request_id] = None
        self._turns.enter(self._rows[request_id].run, request_id, self._rows[request_id].row)

    def _next_suspects(self) -> list[str]:
        """The first group with unfinished rows, left at the head of the queue; others are dropped."""
        while self._suspect_groups:
            self._suspect_groups[0] = [r for r in self._suspect_groups[0] if r in self._rows]
            if self._suspect_groups[0]:
                return self._suspect_groups[0]
            self._suspect_groups.popleft()
        return []

    def finished(self, request_id: str, output_tokens: int = 0) -> bool:
        """A result came, of so many tokens. False when the row is unknown: forgotten, or answered before."""
        self._in_engine.pop(request_id, None)
        self._lent.pop(request_id, None)
        known = self._rows.pop(request_id, None)
        if known is not None:
            self._turns.gone(known.run, request_id, known.row, output_tokens)
        return known is not None

    def run_over(self, run: str) -> None:
        """A run, all of whose rows are gone, will not come back."""
        self._turns.forget(run)

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Drop rows nobody waits for; those the process must be told to abort."""
        dropped = [r for r in request_ids if r in self._rows]
        to_abort = [r for r in dropped if r in self._in_engine]
        for request_id in dropped:
            self.finished(request_id)
        return to_abort

    def interrupted(self) -> None:
        """The process is gone and no row is to blame: its rows wait again, suspects in their group."""
        group = list(self._in_engine)
        self._in_engine.clear()
        if self._is_isolating:
            self._is_isolating = False
            self._set_apart(group)
            self._suspect_groups.appendleft(group)
        else:
            self._wait_again(group)

    def _set_apart(self, suspects: Iterable[str]) -> None:
        for request_id in suspects:
            self._turns.away(self._rows[request_id].run, request_id)

    def crashed(self) -> list[LedgerRow]:
        """The process died: its rows wait again, suspects in groups. Returns the rows given up."""
        group = list(self._in_engine)
        self._in_engine.clear()
        for request_id in group:
            self._rows[request_id].crashes += 1
        if self._is_isolating:
            self._is_isolating = False
            self._set_apart(group)
            return self._split(group)
        suspects = [r for r in group if self._rows[r].crashes >= CRASHES_TO_SUSPECT]
        innocent = [r for r in group if self._rows[r].crashes < CRASHES_TO_SUSPECT]
        # Re-added rows go first: they are nearer to their shard's end.
        self._wait_again(innocent)
        if suspects:
            self._set_apart(suspects)
            self._suspect_groups.append(suspects)
        return []

    def _split(self, group: list[str]) -> list[LedgerRow]:
        if len(group) > 1:
            middle = len(group) // 2
            self._suspect_groups.extendleft([group[middle:], group[:middle]])
            return []
        given_up = []
        for request_id in group:
            row = self._rows[request_id]
            row.crashes_alone += 1
            if row.crashes_alone >= CRASHES_ALONE_TO_GIVE_UP:
                self.finished(request_id)
                given_up.append(row)
            else:
                self._suspect_groups.appendleft([request_id])
        return given_up

    def check_integrity(self) -> None:
        """Raise AssertionError unless every unfinished row is in exactly one place."""
        suspects = [r for group in self._suspect_groups for r in group if r in self._rows]
        waiting = self._turns.waiting()
        places = [*waiting, *self._in_engine, *self._lent, *suspects]
        assert sorted(places) == sorted(self._rows), (
            f"{len(self._rows)} rows: {len(waiting)} wait, {len(self._in_engine)} in the engine, "
            f"{len(self._lent)} lent, {len(suspects)} suspects"
        )


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
