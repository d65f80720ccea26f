"""`RowTable`: rows in front of one engine process, one record with a state for each, and the choice of the next rows.

`TRANSITIONS` says which events may happen to a row in which state. `RowTable._move` applies it and keeps the indexes;
nothing else changes a state. Pure: no process, no thread, no clock.

**Turns.** Runs that share an engine get equal service, counted in tokens: the next row is one of the run that was
served least (the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
section 4). Rows in the process count as if they generated all of `max_tokens`, finished rows by the tokens they
generated. A run that had no rows starts level with the run served least: unused service is not saved up.

**Suspects.** A crash says little about the rows in the process: most are innocent, and are sent again. Rows that saw
two crashes are suspects. They run in groups with nothing else in the process, and a group that crashes is halved until
single rows are left. A row that crashes the process alone, twice, is given up; every other row is cleared by finishing.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, count

from ...engine.request import ExportedRow, Request
from ...scheduler.estimates.lengths import length_class
from ...scheduler.messages import FinishedRows
from .open_shard import OpenShard

logger = logging.getLogger(__name__)
CRASHES_TO_SUSPECT = 2
CRASHES_ALONE_TO_GIVE_UP = 2
# One generated token counts as much as two of a prompt (the paper's weights).
_OUTPUT_WEIGHT = 2.0


class RowState(Enum):
    """Place of a row on its way to its result."""

    WAITING = "waiting"  #: here, until it is the turn of its run
    SENT = "sent"  #: in the engine process
    EXPORTING = "exporting"  #: in the engine process, which was asked to give it up
    LENT = "lent"  #: with another worker's engine
    SUSPECT = "suspect"  #: here, in a group of rows that may kill engines
    FINISHED = "finished"  #: its result was delivered
    DROPPED = "dropped"  #: its shard was closed before its result


class RowEvent(Enum):
    """Event that changes the state of a row."""

    SEND = "send"
    EXPORT = "export"
    LEND = "lend"
    RETURN = "return"
    SUSPECT = "suspect"
    FINISH = "finish"
    DROP = "drop"


_UNFINISHED = (RowState.WAITING, RowState.SENT, RowState.EXPORTING, RowState.LENT, RowState.SUSPECT)
_IN_PROCESS = (RowState.SENT, RowState.EXPORTING)
TRANSITIONS: Mapping[RowEvent, Mapping[RowState, RowState]] = {
    RowEvent.SEND: dict.fromkeys((RowState.WAITING, RowState.SUSPECT), RowState.SENT),
    RowEvent.EXPORT: dict.fromkeys(_IN_PROCESS, RowState.EXPORTING),
    RowEvent.LEND: {RowState.EXPORTING: RowState.LENT},
    RowEvent.RETURN: dict.fromkeys((*_IN_PROCESS, RowState.LENT), RowState.WAITING),
    RowEvent.SUSPECT: dict.fromkeys(_IN_PROCESS, RowState.SUSPECT),
    # A row that is here again may finish too: the helper that it was taken back from may still answer it.
    RowEvent.FINISH: dict.fromkeys(_UNFINISHED, RowState.FINISHED),
    RowEvent.DROP: dict.fromkeys(_UNFINISHED, RowState.DROPPED),
}


@dataclass(slots=True, eq=False)
class QueuedRow:
    """One row of an open shard."""

    #: Id of the row in frames: a number that is never used again.
    row_id: str
    #: Run of the row.
    run: RunRows
    #: Shard of the row.
    shard: OpenShard
    #: The request, and the tokens that were generated when the row last left an engine.
    content: ExportedRow
    #: State of the row; only `RowTable._move` changes it.
    state: RowState = RowState.WAITING
    #: Engine processes that died while the row was in them.
    num_crashes: int = 0
    #: Engine processes that died while the row was alone in them.
    num_crashes_alone: int = 0
    #: Service, in tokens, that the row may take while it is in the process.
    reserved_tokens: float = 0.0

    @property
    def request(self) -> Request:
        """The request, with the id that it has in its shard."""
        return self.content.request

    @property
    def as_sent(self) -> ExportedRow:
        """The row's content with `row_id` as request id, for the process."""
        return replace(self.content, request=replace(self.request, request_id=self.row_id))

    @property
    def is_in_process(self) -> bool:
        """Whether the engine process works on the row."""
        return self.state in _IN_PROCESS

    def service_tokens(self, output_tokens: int) -> float:
        """Service that the row takes to have `output_tokens` generated in all, in the tokens that turns count."""
        begun = len(self.content.token_ids)
        return len(self.request.prompt_token_ids) + begun + _OUTPUT_WEIGHT * (output_tokens - begun)


@dataclass(slots=True, eq=False)
class RunRows:
    """The rows of one run, and the service that it got."""

    #: Id of the run.
    run_id: str
    #: Open shards, each with its unfinished rows by request id, in the plan's order.
    shards: dict[OpenShard, dict[str, QueuedRow]] = field(default_factory=dict)
    #: Waiting rows in order. Rows that are finished or dropped stay until they are at the head.
    waiting: deque[QueuedRow] = field(default_factory=deque)
    #: Rows in the state WAITING.
    num_waiting: int = 0
    #: Rows without a result.
    num_unfinished: int = 0
    #: Service that the run has got, in tokens.
    served_tokens: float = 0.0
    #: Service, in tokens, that the run's rows in the process may take.
    reserved_tokens: float = 0.0
    #: Rows finished since `take_finished`, and their tokens, by adapter (None: base model) and class of length.
    _finished: dict[tuple[str | None, int], tuple[int, int]] = field(default_factory=dict)

    def rows(self) -> list[QueuedRow]:
        """Unfinished rows of the run, shard by shard."""
        return [row for rows in self.shards.values() for row in rows.values()]

    def count_finished(self, adapter_id: str | None, output_tokens: int) -> None:
        """Add a finished row to those of the next report."""
        key = adapter_id, length_class(output_tokens)
        num_rows, tokens = self._finished.get(key, (0, 0))
        self._finished[key] = num_rows + 1, tokens + output_tokens

    def take_finished(self) -> tuple[FinishedRows, ...]:
        """Rows finished since the last call, by adapter and class of length."""
        finished, self._finished = self._finished, {}
        return tuple(FinishedRows(adapter_id, *counts) for (adapter_id, _), counts in finished.items())


class RowTable:
    """The unfinished rows of one engine process."""

    def __init__(self) -> None:
        self.runs: dict[str, RunRows] = {}
        self._row_ids = map(str, count())
        self._rows: dict[str, QueuedRow] = {}
        # Unfinished rows by state, each in the order in which rows took the state.
        self._in_state: dict[RowState, dict[str, QueuedRow]] = {state: {} for state in _UNFINISHED}
        # Groups of suspects, each of which runs alone. Finished or dropped rows stay until their group is at the head.
        self._suspect_groups: deque[list[QueuedRow]] = deque()
        # Whether the process has a group of suspects.
        self._is_isolating = False

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, row_id: str) -> QueuedRow | None:
        """The unfinished row with this id; None if there is none."""
        return self._rows.get(row_id)

    def in_state(self, state: RowState) -> Collection[QueuedRow]:
        """Unfinished rows in this state."""
        return self._in_state[state].values()

    @property
    def in_process(self) -> list[QueuedRow]:
        """Rows that the engine process works on."""
        return list(chain.from_iterable(map(self.in_state, _IN_PROCESS)))

    @property
    def num_in_process(self) -> int:
        """Number of rows that the engine process works on."""
        return sum(len(self._in_state[state]) for state in _IN_PROCESS)

    @property
    def num_active_runs(self) -> int:
        """Number of runs with unfinished rows."""
        return sum(run.num_unfinished > 0 for run in self.runs.values())

    @property
    def is_searching(self) -> bool:
        """Whether suspects are alone in the process, whose death would leave fewer of them."""
        return self._is_isolating and self.num_in_process > 0

    def in_process_by_run(self) -> Counter[str]:
        """Run id -> number of its rows in the process."""
        return Counter(row.run.run_id for row in self.in_process)

    def add(self, shard: OpenShard) -> None:
        """Add the rows of a shard, which wait behind other rows of their run."""
        self.runs[shard.run_id].waiting.extend(self._new_rows(shard, shard.rows))

    def extend(self, shard: OpenShard, contents: Sequence[ExportedRow]) -> None:
        """Add further rows of a shard, which wait ahead of other rows of their run: the shard is older than theirs."""
        self.runs[shard.run_id].waiting.extendleft(reversed(self._new_rows(shard, contents)))

    def _new_rows(self, shard: OpenShard, contents: Sequence[ExportedRow]) -> list[QueuedRow]:
        run = self.runs[shard.run_id]
        if contents and not run.num_unfinished:
            least = min((r.served_tokens for r in self.runs.values() if r.num_unfinished), default=0.0)
            run.served_tokens = max(least, run.served_tokens)
        rows = [QueuedRow(next(self._row_ids), run, shard, content) for content in contents]
        of_shard = run.shards.setdefault(shard, {})
        num_rows = len(of_shard) + len(rows)
        of_shard |= {row.request.request_id: row for row in rows}
        assert len(of_shard) == num_rows, f"shard {shard.shard_id}: two rows have one request id"
        new = {row.row_id: row for row in rows}
        self._rows |= new
        self._in_state[RowState.WAITING] |= new
        run.num_waiting += len(rows)
        run.num_unfinished += len(rows)
        return rows

    def finish(self, row: QueuedRow, output_tokens: int) -> None:
        """Finish a row whose result has `output_tokens` tokens in all."""
        if row.is_in_process and output_tokens:
            row.run.served_tokens += row.service_tokens(output_tokens)
        self._move(row, RowEvent.FINISH)

    def drop(self, rows: Iterable[QueuedRow]) -> list[str]:
        """Forget rows. Returns the ids of those that the process must abort."""
        dropped = list(rows)
        to_abort = [row.row_id for row in dropped if row.is_in_process]
        for row in dropped:
            self._move(row, RowEvent.DROP)
        return to_abort

    def exportable(self, rows: Iterable[QueuedRow]) -> list[QueuedRow]:
        """Rows among `rows` that are in the process and have seen no crash; none while suspects run alone."""
        return [] if self._is_isolating else [row for row in rows if row.is_in_process and not row.num_crashes]

    def export(self, rows: Iterable[QueuedRow]) -> None:
        """Note that the process was asked to give rows up."""
        for row in rows:
            self._move(row, RowEvent.EXPORT)

    def lend(self, rows: Iterable[QueuedRow]) -> None:
        """Note that rows which the process has given up go to another engine."""
        for row in rows:
            self._move(row, RowEvent.LEND)

    def give_back(self, rows: Sequence[QueuedRow]) -> None:
        """Have rows wait here again, before other rows of their run."""
        for row in reversed(rows):
            self._move(row, RowEvent.RETURN)

    def take(self, window: int | None = None) -> list[QueuedRow]:
        """Rows to send now, which count as in the process from now on. `window`: most rows in it; None for no limit."""
        if self.is_searching:
            return []
        group = self._next_suspects()
        self._is_isolating = bool(group) and not self.num_in_process
        if self._is_isolating:
            self._suspect_groups.popleft()
            for row in group:
                self._move(row, RowEvent.SEND)
            return group
        return [] if group else self._take_turns(window)

    def _next_suspects(self) -> list[QueuedRow]:
        """Unfinished rows of the first group that has some. The group stays at the head."""
        while self._suspect_groups:
            group = [row for row in self._suspect_groups[0] if row.state is RowState.SUSPECT]
            if group:
                return group
            self._suspect_groups.popleft()
        return []

    def _take_turns(self, window: int | None) -> list[QueuedRow]:
        taken: list[QueuedRow] = []
        while window is None or self.num_in_process < window:
            runs = [run for run in self.runs.values() if run.num_waiting]
            if not runs:
                break
            run = min(runs, key=lambda run: (run.served_tokens + run.reserved_tokens, run.run_id))
            while (row := run.waiting.popleft()).state is not RowState.WAITING:
                pass
            self._move(row, RowEvent.SEND)
            taken.append(row)
        return taken

    def interrupted(self) -> None:
        """Handle the end of a process for which no row is to blame: its rows wait again, suspects in their group."""
        rows = self.in_process
        if self._is_isolating:
            self._is_isolating = False
            self._suspect_groups.appendleft(self._suspected(rows))
        else:
            self.give_back(rows)

    def crashed(self) -> list[QueuedRow]:
        """Handle a crash of the process: its rows wait again, suspects in groups. Returns rows that are given up; they
        are finished.
        """
        rows = self.in_process
        for row in rows:
            row.num_crashes += 1
        if self._is_isolating:
            self._is_isolating = False
            return self._halve(rows)
        suspects = [row for row in rows if row.num_crashes >= CRASHES_TO_SUSPECT]
        # Rows that are no suspects go first: they are nearer to their shard's end.
        self.give_back([row for row in rows if row.num_crashes < CRASHES_TO_SUSPECT])
        if suspects:
            self._suspect_groups.append(self._suspected(suspects))
        return []

    def _halve(self, group: list[QueuedRow]) -> list[QueuedRow]:
        """Halve a group of suspects that has crashed the process, or count the crash against a row that was alone.
        Returns rows that are given up.
        """
        if len(group) > 1:
            middle = len(group) // 2
            self._suspect_groups.extendleft([self._suspected(group[middle:]), self._suspected(group[:middle])])
            return []
        for row in group:
            row.num_crashes_alone += 1
            if row.num_crashes_alone >= CRASHES_ALONE_TO_GIVE_UP:
                self._move(row, RowEvent.FINISH)
                return [row]
            self._suspect_groups.appendleft(self._suspected([row]))
        return []

    def _suspected(self, rows: list[QueuedRow]) -> list[QueuedRow]:
        for row in rows:
            self._move(row, RowEvent.SUSPECT)
        return rows

    def _move(self, row: QueuedRow, event: RowEvent) -> None:
        """Change a row's state by `TRANSITIONS`, and the indexes with it."""
        before, after = row.state, TRANSITIONS[event].get(row.state)
        request_id, run = row.request.request_id, row.run
        assert after is not None, f"row {request_id} of run {run.run_id}: {event.value} while {before.value}"
        logger.debug("row %s (%s of run %s): %s -> %s", row.row_id, request_id, run.run_id, before.value, after.value)
        row.state = after
        del self._in_state[before][row.row_id]
        if before is RowState.WAITING:
            run.num_waiting -= 1
        if before in _IN_PROCESS and after not in _IN_PROCESS:
            run.reserved_tokens -= row.reserved_tokens
        if after not in _UNFINISHED:
            self._remove(row)
            return
        self._in_state[after][row.row_id] = row
        if after is RowState.SENT:
            row.reserved_tokens = row.service_tokens(row.request.sampling.max_tokens)
            run.reserved_tokens += row.reserved_tokens
        if after is RowState.WAITING:
            run.num_waiting += 1
            run.waiting.appendleft(row)

    def _remove(self, row: QueuedRow) -> None:
        run, rows = row.run, row.run.shards[row.shard]
        del self._rows[row.row_id]
        del rows[row.request.request_id]
        # Rows that several requests answer may have further ones, and rows may be announced.
        if not rows and row.shard.rows_left is None and not row.shard.num_announced:
            del run.shards[row.shard]
        run.num_unfinished -= 1
        if not run.num_waiting:
            run.waiting.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless states, indexes and counts agree."""
        counts = {state.value: len(rows) for state, rows in self._in_state.items()}
        assert sum(counts.values()) == len(self._rows), f"{len(self._rows)} rows, by state {counts}"
        for state, rows in self._in_state.items():
            wrong = [row for row in rows.values() if row.state is not state or self._rows.get(row.row_id) is not row]
            assert not wrong, f"{len(wrong)} rows are not {state.value}, as {wrong[0].row_id} is {wrong[0].state.value}"
        grouped = [row for group in self._suspect_groups for row in group if row.state is RowState.SUSPECT]
        assert Counter(grouped) == Counter(self.in_state(RowState.SUSPECT)), (
            f"{len(grouped)} rows in groups, {counts['suspect']} suspects"
        )
        num_unfinished = sum(run.num_unfinished for run in self.runs.values())
        assert num_unfinished == len(self._rows), f"{num_unfinished} rows of runs, {len(self._rows)} in the table"
        for run in self.runs.values():
            self._check_run(run)

    def _check_run(self, run: RunRows) -> None:
        rows = run.rows()
        assert len(rows) == run.num_unfinished, f"run {run.run_id}: {len(rows)} rows, counted {run.num_unfinished}"
        ahead = [row for row in run.waiting if row.state is RowState.WAITING]
        assert Counter(ahead) == Counter(row for row in rows if row.state is RowState.WAITING), (
            f"run {run.run_id}: {len(ahead)} rows in line, {run.num_waiting} wait"
        )
        assert len(ahead) == run.num_waiting, f"run {run.run_id}: {len(ahead)} rows wait, counted {run.num_waiting}"
        reserved = sum(row.reserved_tokens for row in rows if row.is_in_process)
        assert reserved == run.reserved_tokens, f"run {run.run_id}: {reserved} tokens reserved, {run.reserved_tokens}"
        for shard, unfinished in run.shards.items():
            assert shard.num_unfinished == len(unfinished), (
                f"shard {shard.shard_id}: waits for {shard.num_unfinished} rows, {len(unfinished)} are unfinished"
            )
