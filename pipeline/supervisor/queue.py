"""`EngineQueue`: the queue in front of one engine process, with the open shards of all runs that share it.

Pure: no thread, no process, no clock. Events come in by calls, frames for the process go out by `take_frames`, results
go to the shards. `rows.py` has the rows and their states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from ...engine.request import ExportedRow, Result
from ...engine.server.frames import (
    AbortRows,
    AddRows,
    ExpectRows,
    ExportRows,
    RegisterAdapter,
    RowTokens,
    ToEngine,
)
from ..messages import ShardAbandonedError
from .open_shard import OpenShard, ServedRow
from .rows import QueuedRow, RowState, RowTable, RunRows

# Batches of rows that runs which share an engine have in it together: one runs, and the rows that enter next are near.
SHARED_BATCHES = 1.5
# Function of the rows that the process has given up, which must move them out of the state EXPORTING.
_Receiver = Callable[[list[QueuedRow]], None]
#: Open shard, and rows of it that have left the engine for another worker's.
LentRows = tuple[OpenShard, tuple[ExportedRow, ...]]


class EngineQueue:
    """Runs, their open shards and rows, adapters, and exports that the process was asked for.

    Rows wait in `rows.RowTable`. The debug log has one line for each change of a row's state.
    """

    def __init__(self) -> None:
        #: The rows; callers only read it.
        self.table = RowTable()
        self._frames: list[ToEngine] = []
        # Receivers of exports, in the order in which the process will reply.
        self._exports: deque[_Receiver] = deque()
        self._adapters: dict[str, RegisterAdapter] = {}
        # Adapters that the present process knows.
        self._registered: set[str] = set()
        # Adapter -> rows to announce with its next rows.
        self._expected: dict[str, int] = {}
        self._is_ready = False
        self._failure: Exception | None = None
        #: Whether a report is due: a shard has all its results, or rows have come from another worker.
        self.has_news = False

    def lent_by_shard(self, run_id: str) -> Counter[int]:
        """Rows of a run that other engines work on, by shard."""
        lent = (row.shard for row in self.table.in_state(RowState.LENT) if row.run.run_id == run_id)
        return Counter(shard.shard_id for shard in lent if shard.shard_id is not None)

    def join(self, run_id: str) -> None:
        """Let a run open shards from now on."""
        assert run_id not in self.table.runs, f"run {run_id} uses this engine already"
        self.table.runs[run_id] = RunRows(run_id)

    def hand_back(self, run_id: str, then: Callable[[], None]) -> None:
        """Have the process give up all rows of a run, so that no generated tokens are lost; then call `then`."""
        run = self.table.runs.get(run_id)
        self._hand_back(run.rows() if run is not None else (), then)

    def leave(self, run_id: str) -> None:
        """End a run: its open shards fail, with the tokens generated for them, and its rows leave the engine."""
        run = self.table.runs.get(run_id)
        if run is not None:
            self._fail_all(run, ShardAbandonedError("The worker stopped before the shard was done."))
            del self.table.runs[run_id]

    def fail(self, failure: Exception) -> None:
        """Give the engine up: all open shards fail, and shards that are opened later too."""
        self._failure = failure
        self._end_exports()
        for run in self.table.runs.values():
            self._fail_all(run, failure)

    def _fail_all(self, run: RunRows, reason: Exception) -> None:
        for shard in list(run.shards):
            self._fail(shard, reason)

    def open(self, shard: OpenShard, adapters: Sequence[RegisterAdapter], rows_behind: int = 0) -> None:
        """Add the rows of a shard, which wait for their turn. `adapters`: of these rows. `rows_behind`: rows to
        announce, as in `RunShard`, if all rows of the shard are here and have one adapter.
        """
        if shard.run_id not in self.table.runs or self._failure is not None:
            shard.fail(self._failure or ShardAbandonedError("The worker stopped before the shard was opened."))
            return
        self.table.add(shard)
        self.has_news |= shard.shard_id is None
        self._adapters |= {adapter.adapter_id: adapter for adapter in adapters}
        if shard.shard_id is not None and len(adapters) == 1 and not shard.num_announced:
            self._expected[adapters[0].adapter_id] = rows_behind

    def extend(self, shard: OpenShard, rows: Sequence[ExportedRow], adapters: Sequence[RegisterAdapter] = ()) -> None:
        """Add announced rows to an open shard (`OpenShard.extend`), before other rows of their run: the shard is older
        than those that were opened behind it. `adapters`: those of the rows that the shard had no rows of before.
        """
        if shard.run_id not in self.table.runs or self._failure is not None or shard.is_surrendered:
            shard.fail(self._failure or ShardAbandonedError("The worker stopped before the shard was done."))
            return
        if not shard.is_abandoned:
            self._adapters |= {adapter.adapter_id: adapter for adapter in adapters}
            shard.extend(len(rows))
            self.table.extend(shard, rows)

    def rows_done(self, shard: OpenShard, finished: Sequence[tuple[str | None, int]]) -> None:
        """Note that rows of the plan are done, of which several requests answer each. `finished`: adapter and tokens of
        each row.
        """
        run = self.table.runs.get(shard.run_id)
        if run is None or shard.rows_left is None:
            return
        shard.rows_left -= len(finished)
        self.has_news |= not shard.rows_left
        for adapter_id, num_tokens in finished:
            run.count_finished(adapter_id, num_tokens)

    def abandon(self, shard: OpenShard) -> None:
        """Close a shard whose results are not needed any more; its rows leave the engine."""
        shard.is_abandoned = True
        run = self.table.runs.get(shard.run_id)
        to_abort = self.table.drop(self._rows_of(shard).values())
        if to_abort:
            self._frames.append(AbortRows(tuple(to_abort)))
        if run is not None:
            run.shards.pop(shard, None)

    def surrender(self, shard: OpenShard) -> None:
        """Fail a shard with `ShardAbandonedError`, once the process has given up its rows."""
        shard.is_surrendered = True

        def then() -> None:
            if self._rows_of(shard) or shard.num_announced:
                self._fail(shard, ShardAbandonedError("The rows are needed elsewhere."))

        self._hand_back(self._rows_of(shard).values(), then)

    def _fail(self, shard: OpenShard, reason: Exception) -> None:
        begun = [row.content for row in self._rows_of(shard).values() if row.content.token_ids]
        self.abandon(shard)
        shard.fail(reason, begun)

    def _rows_of(self, shard: OpenShard) -> dict[str, QueuedRow]:
        """Unfinished rows of a shard, by request id; none when it is not open."""
        run = self.table.runs.get(shard.run_id)
        return run.shards.get(shard, {}) if run is not None else {}

    def lend(
        self,
        run_id: str,
        shard_id: int,
        num_rows: int,
        lent: Future[LentRows | None],
        is_selective: bool = False,
        adapter_id: str | None = None,
    ) -> None:
        """Ask the process for the last `num_rows` rows of an open shard that may leave: they have the most tokens left
        to generate. `is_selective`: whether only rows of the adapter `adapter_id` are asked for (None: of the base
        model), instead of rows of any. `lent` gets the shard and the rows, perhaps fewer, or None. `answered`,
        `returned` or `reclaim` must follow for each of them.
        """
        run = self.table.runs.get(run_id)
        shard = next((shard for shard in run.shards if shard.shard_id == shard_id), None) if run is not None else None
        if shard is None:
            lent.set_result(None)
            return
        rows = self._sent(self._rows_of(shard).values())
        if is_selective:
            rows = [row for row in rows if row.request.adapter_id == adapter_id]

        def receive(given_up: list[QueuedRow]) -> None:
            self.table.lend(given_up)
            contents = tuple(row.content for row in given_up)
            lent.set_result((shard, contents) if contents else None)

        self._export(rows[max(0, len(rows) - num_rows) :], receive)

    def answered(self, shard: OpenShard, served: Iterable[ServedRow]) -> None:
        """Take results of lent rows from another engine. Results of a shard that was closed meanwhile are dropped."""
        for row in served:
            known = self._rows_of(shard).get(row.result.request_id)
            if known is None:
                continue
            if known.is_in_process:
                # The row was taken back before its helper answered after all.
                self._frames.append(AbortRows((known.row_id,)))
            self._finish(known, row.result, row.num_crashes)

    def returned(self, shard: OpenShard, contents: Iterable[ExportedRow]) -> None:
        """Take lent rows back with the tokens that another engine has generated for them; they go on here."""
        generated = {content.request.request_id: content for content in contents}
        for row in self._lent(shard, generated):
            row.content = generated[row.request.request_id]
        self.reclaim(shard, generated)

    def reclaim(self, shard: OpenShard, request_ids: Iterable[str]) -> None:
        """Take lent rows back as they were when they left; they go on here."""
        self.table.give_back(self._lent(shard, request_ids))

    def _lent(self, shard: OpenShard, request_ids: Iterable[str]) -> list[QueuedRow]:
        rows = map(self._rows_of(shard).get, request_ids)
        return [row for row in rows if row is not None and row.state is RowState.LENT]

    def _hand_back(self, rows: Iterable[QueuedRow], then: Callable[[], None]) -> None:
        def receive(given_up: list[QueuedRow]) -> None:
            self.table.give_back(given_up)
            then()

        # Rows that are leaving already are asked for again: `then` must follow the reply that has their tokens.
        self._export(self.table.exportable(rows), receive)

    def _sent(self, rows: Iterable[QueuedRow]) -> list[QueuedRow]:
        """Rows among `rows` that the process can be asked for and was not asked for yet."""
        return [row for row in self.table.exportable(rows) if row.state is RowState.SENT]

    def _export(self, rows: Sequence[QueuedRow], receive: _Receiver) -> None:
        if not rows:
            receive([])
            return
        self.table.export(rows)
        self._exports.append(receive)
        self._frames.append(ExportRows(tuple(row.row_id for row in rows)))

    def _end_exports(self) -> None:
        """End all exports without rows, since the process will not reply any more."""
        while self._exports:
            self._exports.popleft()([])

    def _withdraw(self, window: int) -> None:
        """Have the process give up rows beyond `window`, when another run has come: rows that were sent while one run
        had the engine alone wait for their turn again.
        """
        sent = self.table.in_state(RowState.SENT)
        surplus = len(sent) - window
        if surplus > 0:
            ((run, num_rows),) = Counter(row.run for row in sent).most_common(1)
            rows = self._sent(run.rows())
            self._export(rows[max(0, len(rows) - min(surplus, num_rows)) :], self.table.give_back)

    def process_ready(self) -> None:
        """Note that the process has loaded its model."""
        self._is_ready = True

    def take_frames(self, batch_rows: int) -> list[ToEngine]:
        """Frames to send to the process now, with the rows whose turn it is. A run alone gives it all of its rows."""
        if self._is_ready:
            window = shared_window(batch_rows) if self.table.num_active_runs > 1 else None
            if window is not None:
                self._withdraw(window)
            self._send(self.table.take(window))
        frames, self._frames = self._frames, []
        return frames

    def _send(self, rows: Sequence[QueuedRow]) -> None:
        """Add frames for adapters that the process does not know, announced rows, then the rows themselves."""
        if not rows:
            return
        needed = dict.fromkeys(row.request.adapter_id for row in rows if row.request.adapter_id is not None)
        for adapter_id in needed:
            if adapter_id not in self._registered:
                self._frames.append(self._adapters[adapter_id])
        self._registered |= needed.keys()
        for adapter_id in needed.keys() & self._expected.keys():
            self._frames.append(ExpectRows(adapter_id, self._expected.pop(adapter_id)))
        self._frames.append(AddRows(tuple(row.as_sent for row in rows)))

    def exported(self, given_up: Iterable[RowTokens]) -> None:
        """Take the rows of the oldest export, which the process has given up."""
        rows: list[QueuedRow] = []
        for tokens in given_up:
            row = self.table.find(tokens.request_id)
            if row is not None and row.state is RowState.EXPORTING:
                row.content = replace(
                    row.content,
                    token_ids=tokens.token_ids,
                    token_logprobs=tokens.token_logprobs,
                    top_logprobs=tokens.top_logprobs,
                    teacher=tokens.teacher,
                )
                rows.append(row)
        self._exports.popleft()(rows)

    def finished(self, results: Iterable[Result]) -> None:
        """Deliver results of the process. Results of rows that were dropped meanwhile are ignored."""
        for result in results:
            row = self.table.find(result.request_id)
            if row is not None:
                self._finish(row, replace(result, request_id=row.request.request_id))

    def _finish(self, row: QueuedRow, result: Result, num_crashes_elsewhere: int = 0) -> None:
        self.table.finish(row, _generated_tokens(row, result))
        self._deliver(row, ServedRow(result, row.num_crashes + num_crashes_elsewhere))

    def _deliver(self, row: QueuedRow, served: ServedRow) -> None:
        is_last = row.shard.deliver(served)
        if row.shard.rows_left is None:
            row.run.count_finished(row.request.adapter_id, _generated_tokens(row, served.result))
            self.has_news |= is_last

    def process_gone(self, reason: str, *, is_spared: bool) -> int:
        """Handle the death of the process. `is_spared`: none of its rows is to blame. Returns the number of rows that
        are given up for it.
        """
        self._is_ready = False
        self._registered.clear()
        self._end_exports()
        if is_spared:
            self.table.interrupted()
            blamed = []
        else:
            blamed = self.table.crashed()
        for row in blamed:
            error = f"the engine process died each time it worked on this row, last because {reason}"
            self._deliver(row, ServedRow(Result.refused(row.request, error), row.num_crashes))
        self._frames.clear()
        return len(blamed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table is consistent and exports agree with the rows that are leaving."""
        self.table.check_integrity()
        num_leaving = len(self.table.in_state(RowState.EXPORTING))
        assert self._exports or not num_leaving, f"{num_leaving} rows are leaving, no export is under way"
        counts = f"{self.table.num_in_process} rows, {len(self._exports)} exports"
        assert self._is_ready or not (self.table.num_in_process or self._exports), f"{counts} without a process"


def _generated_tokens(row: QueuedRow, result: Result) -> int:
    """Tokens that an engine has generated for a row; of a given completion that it computes as a prompt, the last."""
    return min(result.completion_tokens, 1) if row.request.sampling.is_given else result.completion_tokens


def shared_window(batch_rows: int) -> int:
    """Most rows in an engine that several runs share."""
    return max(batch_rows + 1, round(SHARED_BATCHES * batch_rows))
