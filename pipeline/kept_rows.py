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
    """What still holds of a shard's journals and of its part.

    A committed part with rows that do not hold any more (their adapter changed, or they were errors) is taken
    apart: what holds is journalled first, then the part is removed, so that nothing is lost in between.
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
            in_part = answers_in_part(part, rows, record.input.roles.get("id", "id"))
        kept.answers.update(in_part)
        if len(kept.answers) < len(by_fingerprint):
            store.append_wip(rows.shard_id, f"part-{uuid4().hex[:8]}", encode_answers(in_part.values()))
            store.remove_part(rows.shard_id)
    return kept


def _begin(kept: KeptRows, request: Request, row: BegunRow) -> None:
    """The longest that any attempt has come with a row."""
    begun = ExportedRow(request, row.token_ids, row.token_logprobs)
    before = kept.begun.get(request.request_id)
    if not begun.problems() and (before is None or len(before.token_ids) < len(begun.token_ids)):
        kept.begun[request.request_id] = begun
