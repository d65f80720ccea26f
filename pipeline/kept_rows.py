"""What earlier attempts at a shard have left in the output: answers that still hold, and rows they had begun."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from ..engine.exported_row import ExportedRow
from ..engine.request import Request
from ..jobs.record import JobRecord
from ..jobs.store import JobStore
from .reader import ShardRows
from .row_answer import BegunRow, RowAnswer, decode_journal, encode_answers
from .writer import answers_in_part, still_valid


@dataclass(frozen=True, slots=True)
class KeptRows:
    """By request id. `begun`: rows without an answer, and what was generated for them."""

    answers: dict[str, RowAnswer]
    begun: dict[str, ExportedRow]


def read_kept(store: JobStore, record: JobRecord, rows: ShardRows) -> KeptRows:
    """What still holds of a shard's journals, and of a part that is not `read_done`.

    Such a part was written by a worker of a former run that went on for too long. What holds of it is journalled first,
    then it is removed, so that nothing is lost in between.
    """
    by_fingerprint = {
        fingerprint: request
        for request, fingerprint in zip(rows.requests, rows.fingerprints, strict=True)
        if isinstance(request, Request)
    }
    kept = KeptRows({}, {})
    for journal in store.read_wip(rows.shard_id):
        for row in decode_journal(journal):
            request = by_fingerprint.get(row.fingerprint)
            if request is None or not still_valid(row, request.adapter_id, row.fingerprint):
                continue
            if isinstance(row, BegunRow):
                _begin(kept, request, row)
            elif row.error is None:
                # Errors are not kept: another attempt may do better.
                kept.answers[request.request_id] = row
    if store.is_committed(rows.shard_id):
        with store.open_part(rows.shard_id) as part:
            in_part = answers_in_part(part, rows, record)
        kept.answers.update(in_part)
        store.append_wip(rows.shard_id, f"part-{uuid4().hex[:8]}", encode_answers(in_part.values()))
        store.remove_part(rows.shard_id)
    return kept


def read_done(store: JobStore, record: JobRecord, rows: ShardRows) -> dict[str, RowAnswer] | None:
    """The answers of the shard's part, errors included; None when it is not there, or says something else than an
    attempt would today.
    """
    if not store.is_committed(rows.shard_id):
        return None
    with store.open_part(rows.shard_id) as part:
        answers = answers_in_part(part, rows, record, with_errors=True)
    return answers if len(answers) == sum(isinstance(request, Request) for request in rows.requests) else None


def _begin(kept: KeptRows, request: Request, row: BegunRow) -> None:
    """The longest that any attempt has come with a row."""
    begun = ExportedRow(request, row.token_ids, row.token_logprobs)
    before = kept.begun.get(request.request_id)
    if not begun.problems() and (before is None or len(before.token_ids) < len(begun.token_ids)):
        kept.begun[request.request_id] = begun
