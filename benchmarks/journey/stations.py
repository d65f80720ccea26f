"""`STATIONS`: functions that print what one row of a recorded run was at each station of its journey."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.journey.recorded_run import RecordedRun
from lorabatch.benchmarks.journey.shown import shortened, shown
from lorabatch.benchmarks.journey.watched_engine import Note, WatchedRow
from lorabatch.demo.make_prompts import PROMPTS
from lorabatch.engine.request import ExportedRow, Request, Result
from lorabatch.engine.server.frames import TO_ENGINE, AddRows, RegisterAdapter, Results, encode_frame
from lorabatch.jobs.input.columns import answer_fields
from lorabatch.jobs.parts import PartMark
from lorabatch.jobs.record import JobRecord
from lorabatch.pipeline.dataset import schema as prepared
from lorabatch.pipeline.dataset.answers import decode_journal
from lorabatch.pipeline.dataset.chunk import ChunkRef, IndexJob
from lorabatch.pipeline.dataset.index import index_chunk, list_chunks, spelling
from lorabatch.pipeline.dataset.reader import read_shard
from lorabatch.pipeline.messages import WorkerReport
from lorabatch.pipeline.planning.plan import JobPlan, read_plan
from lorabatch.scheduler.messages import Command, Event, FinishJob, Record, RunShard, ShardCommitted

#: Id of the row in `demo/prompts.parquet`.
ROW_ID = "contacts-016"
# Columns that the row's part has beside those of the answer.
_ID_COLUMNS = ("id", "adapter")
# Steps that are shown at the beginning and at the end of the row.
_FIRST_STEPS, _LAST_STEPS = 4, 2


@dataclass(frozen=True)
class Journey:
    """The row with the id `ROW_ID` in a recorded run."""

    run: RecordedRun

    @cached_property
    def record(self) -> JobRecord:
        """The frozen job."""
        return self.run.store.read_record()

    @cached_property
    def chunk(self) -> ChunkRef:
        """The chunk that has the row."""
        number = pq.read_table(PROMPTS, columns=["id"]).column("id").to_pylist().index(ROW_ID)
        chunks = list_chunks(self.record, self.run.spec.places)
        return next(
            chunk
            for chunk in chunks
            for group in chunk.row_groups
            if group.first_row <= number < group.first_row + group.num_rows
        )

    @cached_property
    def prepared_row(self) -> dict[str, Any]:
        """The row as the index has prepared it."""
        table = _read_all(self.run.kept.rows_source(self.chunk.chunk_id))
        return next(row for row in table.to_pylist() if row["id"] == ROW_ID)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """Numbers of the row in the index."""
        rows = _read_all(self.run.kept.rows_source(self.chunk.chunk_id)).column("id").to_pylist()
        index = _read_all(self.run.kept.index_source(self.chunk.chunk_id))
        return dict(index.slice(rows.index(ROW_ID), 1).to_pylist()[0])

    @cached_property
    def plan(self) -> JobPlan:
        """The plan of the job."""
        return read_plan(self.run.store)

    @cached_property
    def reference(self) -> dict[str, int]:
        """The plan's row for the prepared row: its place, and the hashes by which an update finds it."""
        return self._planned[1]

    @cached_property
    def shard_id(self) -> int:
        """Number of the shard that has the row."""
        return self._planned[0]

    @cached_property
    def _planned(self) -> tuple[int, dict[str, int]]:
        place = {"chunk": self.chunk.chunk_id, "batch": self.numbers["batch"], "row": self.numbers["row"]}
        with prepared.arrow_file(self.run.store.plan_source()) as plan:
            batches = [plan.get_batch(number).to_pylist() for number in range(plan.num_record_batches)]
        rows = ((number, row) for number, batch in enumerate(batches) for row in batch)
        return next((number, row) for number, row in rows if place.items() <= row.items())

    @cached_property
    def request(self) -> Request:
        """The request that the worker makes of the prepared row."""
        rows = read_shard(self.run.kept, self.record, self.shard_id).requests
        return next(row for row in rows if isinstance(row, Request) and row.request_id == self.request_id)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return str(self.prepared_row[prepared.REQUEST_ID])

    @cached_property
    def events(self) -> list[Record]:
        """Events of the scheduler, each with the commands that followed it, without those before the first event."""
        lines = self.run.store.read_events()[1:]
        return [(Event if line["kind"] in Event.kinds else Command).from_json(line) for line in lines]

    def command(self) -> tuple[Record, RunShard]:
        """The command that opens the row's shard, and the event that it follows."""
        place = next(i for i, e in enumerate(self.events) if isinstance(e, RunShard) and e.shard_id == self.shard_id)
        event = next(event for event in reversed(self.events[:place]) if isinstance(event, Event))
        command = self.events[place]
        assert isinstance(command, RunShard)
        return event, command

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """Notes of the engine that has answered the row."""
        return next(notes for notes in self.run.notes if any(self._of_row(note) for note in notes))

    def _of_row(self, note: Note) -> ExportedRow | None:
        if not isinstance(note, AddRows):
            return None
        return next((row for row in note.rows if row.request.stream_id == self.request.stream_id), None)

    @cached_property
    def sent(self) -> tuple[AddRows, ExportedRow]:
        """The message with the row to the engine process, and the row in it."""
        return next((note, row) for note in self.notes if isinstance(note, AddRows) and (row := self._of_row(note)))

    def steps(self) -> Iterator[tuple[int, tuple[WatchedRow, ...], WatchedRow]]:
        """Number, rows, and this row of each step that it takes part in. Steps of an engine count from 1."""
        row_id = self.sent[1].request.request_id
        steps = (note for note in self.notes if isinstance(note, tuple))
        for number, rows in enumerate(steps, 1):
            for row in rows:
                if row.sequence.request.request_id == row_id:
                    yield number, rows, row

    @cached_property
    def result(self) -> tuple[Results, Result]:
        """The message with the row's result, and the result."""
        row_id = self.sent[1].request.request_id
        messages = (note for note in self.notes if isinstance(note, Results))
        return next((note, r) for note in messages for r in note.results if r.request_id == row_id)

    @cached_property
    def replica(self) -> str:
        """Address of the worker that has opened the row's shard."""
        return self.command()[1].replica_id

    @cached_property
    def report(self) -> WorkerReport:
        """The last report of the worker with the shard open."""
        reports = (report for report in self.run.reports if report.worker == self.replica)
        return [report for report in reports if self.shard_id in {rows.shard_id for rows in report.open_shards}][-1]

    def text_of(self, token_id: int) -> str:
        """Text of a token."""
        spell = spelling(self.record, self.run.spec.model, {})
        words = spell(None, [token_id]) or [b""]
        return words[0].decode("utf-8", "replace")


def _read_all(source: Any) -> pa.Table:
    with prepared.arrow_file(source) as file:
        return file.read_all()


def _row(journey: Journey) -> str:
    return shown(pq.read_table(PROMPTS, filters=[("id", "=", ROW_ID)]).to_pylist()[0])


def _chunk(journey: Journey) -> str:
    job = IndexJob.from_record(journey.record, journey.run.spec)
    # The chunk is indexed already: its counts are read back.
    summary = index_chunk(journey.chunk, job, journey.run.kept)
    return f"{shown(journey.chunk)}\n\n{shown(summary)}"


def _prepared(journey: Journey) -> str:
    return shown({name: value for name, value in journey.prepared_row.items() if name.startswith("__lb_")})


def _index(journey: Journey) -> str:
    return shown(journey.numbers)


def _plan(journey: Journey) -> str:
    return f"{shown(journey.plan.shards[journey.shard_id])}\n\n{shown(journey.reference)}"


def _dispatch(journey: Journey) -> str:
    return "\n\n".join(map(shown, journey.command()))


def _request(journey: Journey) -> str:
    return shown(journey.request)


def _states(journey: Journey) -> str:
    lines = "".join(journey.run.store.read_logs().values()).splitlines()
    marked = (line.partition(" - DEBUG - ")[2] for line in lines)
    return shortened("\n".join(line for line in marked if f"({journey.request_id} of run" in line))


def _frames(journey: Journey) -> str:
    message, row = journey.sent
    register = next(
        note
        for note in journey.notes
        if isinstance(note, RegisterAdapter) and note.adapter_id == row.request.adapter_id
    )
    num_bytes = len(encode_frame(TO_ENGINE, message))
    head = f"AddRows: {len(message.rows)} rows in a frame of {num_bytes:,} bytes, among them"
    return f"{shown(register)}\n\n{head}\n{shown(row)}"


def _sequence(journey: Journey) -> str:
    _, _, row = next(iter(journey.steps()))
    return f"{shown(row.sequence)}\n\n{shown(row.run)}"


def _steps(journey: Journey) -> str:
    lines = ["step  rows  tokens  stored  next token"]
    for number, rows, row in journey.steps():
        token = row.sequence.token_ids[-1] if row.sequence.token_ids else None
        text = "" if token is None else f"{token:>6}  {journey.text_of(token)!r}"
        lines.append(f"{number:>4}  {len(rows):>4}  {row.num_tokens:>6}  {row.sequence.num_stored:>6}  {text}".rstrip())
    left_out = len(lines) - 1 - _FIRST_STEPS - _LAST_STEPS
    if left_out > 0:
        lines[1 + _FIRST_STEPS : -_LAST_STEPS] = [f"   … {left_out} steps more"]
    return "\n".join(lines)


def _result(journey: Journey) -> str:
    message, result = journey.result
    return f"Results: {len(message.results)} of them, among them\n{shown(result)}"


def _report(journey: Journey) -> str:
    return shown(journey.report)


def _journal(journey: Journey) -> str:
    fingerprint = journey.prepared_row[prepared.FINGERPRINT]
    journals = journey.run.kept.read_wip(journey.shard_id)
    rows = (row for journal in journals.values() for row in decode_journal(journal))
    answer = next((row for row in rows if row.fingerprint == fingerprint), None)
    if answer is None:
        raise RuntimeError(f"row {ROW_ID}: its shard was committed before the row was in a journal. Run this again.")
    return shown(answer)


def _part(journey: Journey) -> str:
    with journey.run.store.open_part(journey.shard_id) as file:
        table = pq.read_table(file)
    columns = [*_ID_COLUMNS, *(field.name for field in answer_fields(journey.record))]
    row = next(row for row in table.select(columns).to_pylist() if row["id"] == ROW_ID)
    return f"{shown(row)}\n\n{shown(PartMark.of(table.schema))}"


def _committed(journey: Journey) -> str:
    events = (event for event in journey.events if isinstance(event, ShardCommitted))
    return shown(next(event for event in events if event.shard_id == journey.shard_id))


def _success(journey: Journey) -> str:
    parts, summary = journey.run.store.read_parts(), journey.run.store.read_summary()
    assert isinstance(journey.events[-1], FinishJob)
    assert parts is not None
    assert summary is not None
    counts = {name: summary[name] for name in ("num_rows", "num_errors", "num_parts", "completion_tokens")}
    return "\n\n".join(map(shown, (journey.events[-1], {journey.shard_id: parts[journey.shard_id]}, counts)))


#: Name of a block of the page -> function that prints it.
STATIONS: Mapping[str, Callable[[Journey], str]] = {
    "row": _row,
    "chunk": _chunk,
    "prepared": _prepared,
    "index": _index,
    "plan": _plan,
    "dispatch": _dispatch,
    "request": _request,
    "states": _states,
    "frames": _frames,
    "sequence": _sequence,
    "steps": _steps,
    "result": _result,
    "report": _report,
    "journal": _journal,
    "part": _part,
    "committed": _committed,
    "success": _success,
}
