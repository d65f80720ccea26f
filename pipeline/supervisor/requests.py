"""All rows that one engine process works on, for whatever runs: the state behind `EngineKeeper`.

Pure: no thread, no process, no clock. What happens goes in by calls; what the process must be told comes out as
messages. Results go straight to the shard that waits for them.

Rows that leave an engine before they are finished: who asked for them, and what they got. Pure bookkeeping.

What an engine process must be told so that it can work on some rows. Pure: messages come out, nobody is asked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...engine.request import ExportedRow, Request, Result
from ...engine.server.wire import pack_exported_row, pack_request
from ..messages import FinishedRows, LocalAdapter, ShardAbandonedError
from .open_shard import OpenShard, ServedRow
from .queue import RowLedger

# Runs that share an engine have so many batches of rows in it together: one runs, and what enters next is near.
SHARED_BATCHES = 1.5
Message = dict[str, Any]


class RunRows:
    """What one run has open on an engine, and what finished since it was last asked."""

    def __init__(self) -> None:
        self.shards: list[OpenShard] = []
        self._rows: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def finished(self, adapter_id: str | None, output_tokens: int) -> None:
        """A row came back."""
        self._rows[adapter_id or ""] += 1
        self._tokens[adapter_id or ""] += output_tokens

    def take_finished(self) -> tuple[FinishedRows, ...]:
        """Finished rows by adapter; each is told once."""
        finished = tuple(FinishedRows(a, n, self._tokens[a]) for a, n in self._rows.items())
        self._rows.clear()
        self._tokens.clear()
        return finished


class EngineRows:
    """Open shards of all runs on one engine, their rows, and who waits for each."""

    def __init__(self) -> None:
        self._ledger = RowLedger()
        self._desk = LoanDesk(self._ledger)
        self._feed = EngineFeed()
        self.runs: dict[str, RunRows] = {}
        # request id -> the shard that waits for it, and the request.
        self._waits: dict[str, tuple[OpenShard, Request]] = {}
        self._failure: Exception | None = None
        # Whether the process has loaded its model.
        self._is_ready = False
        # What the process is told next.
        self._aborts: list[Message] = []
        # Something has happened that others wait to hear: guests have come, or a run has nothing left to do here.
        self.has_news = False

    @property
    def num_in_engine(self) -> int:
        """Rows sent to the process and not finished."""
        return self._ledger.num_in_engine

    @property
    def is_searching(self) -> bool:
        """Whether the process runs suspects alone, to find the row that kills engines."""
        return self._ledger.is_searching

    def in_engine_by_run(self) -> Counter[str]:
        """Rows sent to the process and not finished, by run."""
        return self._ledger.in_engine_by_run()

    def lent_by_shard(self, run: str) -> Counter[int]:
        """Rows of a run that other engines work on, by shard."""
        owners = (self._waits[request_id][0] for request_id in self._ledger.lent)
        return Counter(shard.shard_id for shard in owners if shard.run == run and shard.shard_id is not None)

    # Runs

    def join(self, run: str) -> None:
        """A run may open shards from now on."""
        assert run not in self.runs, f"run {run} uses this engine already"
        self.runs[run] = RunRows()

    def hand_back(self, run: str, then: Callable[[], None], only: OpenShard | None = None) -> list[Message]:
        """Have the process give up what it has of a run, or of one shard `only`, so that nothing it has generated is
        lost; then call `then`.
        """
        shards = self.runs[run].shards if self._is_ready and run in self.runs else []
        names = [name for shard in shards if only in (None, shard) for name in shard.request_ids]

        def asker(rows: list[ExportedRow]) -> None:
            self._take_back(rows)
            then()

        return self._export(self._desk.ask(names, len(names), asker))

    def leave(self, run: str) -> list[Message]:
        """A run is over: what it has open is given up with what was generated, its rows leave the engine."""
        rows = self.runs.pop(run, None)
        if rows is None:
            return []
        messages = self._give_up(rows, ShardAbandonedError("The worker stopped before the shard was done."))
        self._ledger.run_over(run)
        return messages

    def fail(self, failure: Exception) -> None:
        """No process will work on any of this: whatever is open fails, and what is opened later too."""
        self._failure = failure
        self._desk.close()
        for rows in self.runs.values():
            self._give_up(rows, failure)

    def _give_up(self, rows: RunRows, reason: Exception) -> list[Message]:
        messages = [message for shard in rows.shards for message in self._fail(shard, reason)]
        rows.shards.clear()
        return messages

    def _fail(self, shard: OpenShard, reason: Exception) -> list[Message]:
        begun = self._ledger.begun(shard.request_ids)
        messages = self._forget(shard)
        shard.fail(reason, begun)
        return messages

    # Shards

    def open(self, shard: OpenShard, adapters: Sequence[LocalAdapter], rows_behind: int = 0) -> None:
        """Rows of a shard wait for their turn. `rows_behind`: see `ShardTask`."""
        rows = self.runs.get(shard.run)
        if rows is None or self._failure is not None:
            shard.fail(self._failure or ShardAbandonedError("The worker stopped before the shard was opened."))
            return
        rows.shards.append(shard)
        self.has_news |= shard.shard_id is None
        self._feed.learn(adapters)
        if shard.shard_id is not None and len(adapters) == 1:
            self._feed.expect(adapters[0].source.adapter_id, rows_behind)
        self._waits.update({row.request.request_id: (shard, row.request) for row in shard.rows})
        self._ledger.add(shard.rows, shard.run)

    def abandon(self, shard: OpenShard) -> list[Message]:
        """Nobody waits for this shard any more; its rows leave the engine."""
        rows = self.runs.get(shard.run)
        if rows is None or shard not in rows.shards:
            shard.is_abandoned = True
            return []
        rows.shards.remove(shard)
        return self._forget(shard)

    def surrender(self, shard: OpenShard) -> list[Message]:
        """A shard is wanted elsewhere: once the process has given up what it has of it, it fails as if its run had
        left, with what was generated.
        """

        def then() -> None:
            rows = self.runs.get(shard.run)
            if rows is not None and shard in rows.shards:
                rows.shards.remove(shard)
                self._aborts += self._fail(shard, ShardAbandonedError("The rows are wanted elsewhere."))

        return self.hand_back(shard.run, then, only=shard)

    def _forget(self, shard: OpenShard) -> list[Message]:
        shard.is_abandoned = True
        for request_id in shard.request_ids:
            self._waits.pop(request_id, None)
        to_abort = self._ledger.forget(shard.request_ids)
        return [{"op": "abort", "request_ids": to_abort}] if to_abort else []

    # Rows that leave before they are finished

    def lend(self, run: str, shard_id: int, num_rows: int, asked: Future[Loan]) -> list[Message]:
        """Ask the process for rows of an open shard that another engine will go on with."""
        shards = self.runs[run].shards if self._is_ready and run in self.runs else []
        shard = next((shard for shard in shards if shard.shard_id == shard_id), None)
        names = shard.request_ids if shard is not None else []
        return self._export(self._desk.ask(names, num_rows, lambda rows: asked.set_result(Loan(shard, tuple(rows)))))

    def answered(self, served: Iterable[ServedRow]) -> None:
        """Another engine has finished rows that were lent. Those that nobody waits for are dropped."""
        for row in served:
            self.finished(row.result, row.num_crashes)

    def _withdraw_surplus(self, batch_rows: int) -> list[Message]:
        """Another run has come: rows that were sent while one had the engine alone wait here again, for their turn."""
        surplus = self._ledger.num_in_engine - self._desk.num_asked - shared_window(batch_rows)
        if surplus <= 0:
            return []
        ((run, num_rows),) = self._ledger.in_engine_by_run().most_common(1)
        names = [name for shard in self.runs[run].shards for name in shard.request_ids]
        return self._export(self._desk.ask(names, min(surplus, num_rows), self._take_back))

    def _take_back(self, rows: Iterable[ExportedRow]) -> None:
        self.reclaim(row.request.request_id for row in rows)

    @staticmethod
    def _export(request_ids: list[str]) -> list[Message]:
        return [{"op": "export", "request_ids": request_ids}] if request_ids else []

    def returned(self, rows: Iterable[ExportedRow]) -> None:
        """Lent rows come back with what another engine has generated for them, and go on here."""
        self._ledger.returned(rows)

    def reclaim(self, request_ids: Iterable[str]) -> None:
        """Lent rows go on here, from where they were when they left."""
        self._ledger.reclaim(request_ids)

    # What the process says, and what it is told

    def process_ready(self) -> None:
        """The process has loaded its model."""
        self._is_ready = True

    def sendable(self, batch_rows: int) -> list[Message]:
        """What the process must be told so that it works on the rows whose turn it is. A run alone gives it all."""
        aborts, self._aborts = self._aborts, []
        if not self._is_ready:
            return []
        if self._ledger.num_runs < 2:
            return aborts + self._feed.messages(self._ledger.take())
        surplus = self._withdraw_surplus(batch_rows)
        return aborts + surplus + self._feed.messages(self._ledger.take(shared_window(batch_rows)))

    def exported(self, rows: Iterable[ExportedRow]) -> None:
        """The process has given rows up, as it was asked."""
        self._desk.exported(rows)

    def finished(self, result: Result, crashes_elsewhere: int = 0) -> None:
        """Hand a result on, unless nobody waits for it any more."""
        if self._failure is None and result.request_id in self._ledger:
            num_crashes = self._ledger.crashes_of(result.request_id) + crashes_elsewhere
            self._ledger.finished(result.request_id, result.completion_tokens)
            self._hand_on(ServedRow(result, num_crashes))

    def _hand_on(self, row: ServedRow) -> None:
        shard, request = self._waits.pop(row.result.request_id)
        rows = self.runs[shard.run]
        rows.finished(request.adapter_id, row.result.completion_tokens)
        shard.deliver(row)
        if not shard.num_unfinished:
            rows.shards.remove(shard)
            self.has_news |= not rows.shards

    def process_gone(self, reason: str, *, is_spared: bool) -> int:
        """The process has died under its rows; `is_spared`: none of them is to blame. How many are given up for it."""
        self._is_ready = False
        self._feed.new_process()
        self._desk.close()
        if is_spared:
            self._ledger.interrupted()
            return 0
        blamed = self._ledger.crashed()
        for row in blamed:
            error = f"the engine process died each time it worked on this row, last because {reason}"
            self._hand_on(ServedRow.given_up(row.row.request, error, row.crashes))
        return len(blamed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each unfinished row has one place and one shard that waits for it."""
        self._ledger.check_integrity()
        open_rows = sum(shard.num_unfinished for rows in self.runs.values() for shard in rows.shards)
        assert self._failure is not None or open_rows == len(self._waits) == len(self._ledger), (
            f"{open_rows} rows of open shards, {len(self._waits)} are waited for, {len(self._ledger)} in the ledger"
        )


def shared_window(batch_rows: int) -> int:
    """Rows in an engine that several runs share."""
    return max(batch_rows + 1, round(SHARED_BATCHES * batch_rows))


Asker = Callable[[list[ExportedRow]], None]


@dataclass(frozen=True, slots=True)
class Loan:
    """Rows that left the engine, under the names that it knows, and the shard that waits for them (None: it is not
    open here).
    """

    shard: OpenShard | None
    rows: tuple[ExportedRow, ...] = ()


class LoanDesk:
    """Whoever asked for rows, in the order in which the engine process will answer."""

    def __init__(self, ledger: RowLedger) -> None:
        self._ledger = ledger
        self._askers: deque[tuple[int, Asker]] = deque()

    @property
    def num_asked(self) -> int:
        """Rows that the process was asked for and has not given up yet."""
        return sum(num_rows for num_rows, _ in self._askers)

    def ask(self, request_ids: Iterable[str], num_rows: int, asker: Asker) -> list[str]:
        """Rows the process must export, the last `num_rows` of these that may leave; `asker` gets them, lent. When
        there are none it is told so at once.
        """
        chosen = self._ledger.lendable(request_ids, num_rows)
        if chosen:
            self._askers.append((len(chosen), asker))
        else:
            asker([])
        return chosen

    def exported(self, rows: Iterable[ExportedRow]) -> None:
        """The process has answered the first who asked."""
        _, asker = self._askers.popleft()
        asker(self._ledger.lend(rows))

    def close(self) -> None:
        """The process will not answer any more."""
        while self._askers:
            self.exported(())


class EngineFeed:
    """Remembers where adapters lie and which of them the present process has heard of."""

    def __init__(self) -> None:
        self._adapters: dict[str, LocalAdapter] = {}
        self._told: set[str] = set()
        self._expected: dict[str, int] = {}

    def learn(self, adapters: Iterable[LocalAdapter]) -> None:
        """Rows of these adapters may come."""
        self._adapters.update({adapter.source.adapter_id: adapter for adapter in adapters})

    def expect(self, adapter_id: str, num_rows: int) -> None:
        """So many rows of an adapter will still come; told with its next rows."""
        self._expected[adapter_id] = num_rows

    def new_process(self) -> None:
        """The next process has heard of nothing."""
        self._told.clear()

    def messages(self, rows: Sequence[ExportedRow]) -> list[dict[str, Any]]:
        """The adapters that are news, then the rows."""
        needed = dict.fromkeys(row.request.adapter_id for row in rows if row.request.adapter_id is not None)
        messages = [self._adapter(adapter_id) for adapter_id in needed if adapter_id not in self._told]
        self._told |= needed.keys()
        messages += [
            {"op": "expect", "adapter_id": adapter_id, "num_rows": self._expected.pop(adapter_id)}
            for adapter_id in needed.keys() & self._expected.keys()
        ]
        begun = [row for row in rows if row.token_ids]
        fresh = [row for row in rows if not row.token_ids]
        if begun:
            messages.append({"op": "import", "rows": [pack_exported_row(row) for row in begun]})
        if fresh:
            messages.append({"op": "add", "requests": [pack_request(row.request) for row in fresh]})
        return messages

    def _adapter(self, adapter_id: str) -> dict[str, Any]:
        adapter = self._adapters[adapter_id]
        return {
            "op": "adapter",
            "adapter_id": adapter_id,
            "path": str(adapter.folder),
            "name": adapter.source.name,
        }
