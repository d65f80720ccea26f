"""`run_shard`: the Dask task that turns one shard into one part.

It leaves the worker's thread pool at once and waits for the engine; any number of shards may be open on a worker.
Answers found in earlier attempts' journals, or in a part whose other rows are out of date, are reused; finished rows
are journalled about once a second; the part is written in one piece at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from distributed import get_worker, secede

from ..engine.request import Request
from ..jobs.record import JobRecord
from ..jobs.store import JobStore
from .engine_host import EngineHost, find_host
from .messages import ShardOutcome
from .open_shard import ServedRow
from .reader import RowError, ShardRows, read_shard
from .row_answer import RowAnswer, decode_answers, encode_answers
from .writer import answers_in_part, part_bytes, still_valid

FLUSH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One attempt at one shard, in one run of a job. `rows_behind`: rows of its adapter that will follow it to an
    engine, where they are planned to run merged."""

    run_id: str
    shard_id: int
    attempt: int
    rows_behind: int = 0


def run_shard(task: ShardTask) -> ShardOutcome:
    """Run one shard on this worker and commit it; join the attempt that has it open here already, if there is one.

    Raises `ShardAbandonedError` when the worker stops first (finished rows stay in `wip`), `EngineFailedError`
    when the engine cannot be kept alive, `StorageError` when storage fails.
    """
    secede()
    host = find_host(get_worker(), task.run_id)
    with host.claimed(task.shard_id) as (claim, is_ours):
        if is_ours:
            claim.set_result(_answer_and_commit(host, task))
        return claim.result()


def _answer_and_commit(host: EngineHost, task: ShardTask) -> ShardOutcome:
    record = host.record()
    rows = read_shard(host.store, record, task.shard_id)
    answers = known_answers(host.store, record, rows)
    num_reused = len(answers)
    asked = [r for r in rows.requests if isinstance(r, Request) and r.request_id not in answers]
    if asked:
        _answer(host, rows, asked, answers, task)
    elif host.store.is_committed(task.shard_id):
        return _outcome(host, rows, answers, num_reused)
    host.store.commit_part(task.shard_id, part_bytes(rows, answers, with_logprobs=record.with_logprobs))
    return _outcome(host, rows, answers, num_reused)


def known_answers(store: JobStore, record: JobRecord, rows: ShardRows) -> dict[str, RowAnswer]:
    """Answers of earlier attempts that still hold, by request id.

    A committed part with rows that do not hold any more (their adapter changed, or they were errors) is taken
    apart: what holds is journalled first, then the part is removed, so that nothing is lost in between.
    """
    by_fingerprint = {
        fingerprint: request
        for request, fingerprint in zip(rows.requests, rows.fingerprints, strict=True)
        if isinstance(request, Request)
    }
    answers: dict[str, RowAnswer] = {}
    for journal in store.read_wip(rows.shard_id):
        for answer in decode_answers(journal):
            request = by_fingerprint.get(answer.fingerprint)
            # Errors are not kept: another attempt may do better.
            if request is None or answer.error is not None:
                continue
            if still_valid(answer, request.adapter_id, answer.fingerprint):
                answers[request.request_id] = answer
    if not store.is_committed(rows.shard_id):
        return answers
    with store.open_part(rows.shard_id) as part:
        in_part = answers_in_part(part, rows, record.input.roles.get("id", "id"))
    answers |= in_part
    if len(answers) < len(by_fingerprint):
        store.append_wip(rows.shard_id, f"part-{uuid4().hex[:8]}", encode_answers(in_part.values()))
        store.remove_part(rows.shard_id)
    return answers


def _answer(
    host: EngineHost, rows: ShardRows, asked: list[Request], answers: dict[str, RowAnswer], task: ShardTask
) -> None:
    """Have the engine answer the rows that are asked; `answers` gains them."""
    adapter_ids = frozenset(r.adapter_id for r in asked if r.adapter_id is not None)
    requests = {request.request_id: request for request in asked}
    fingerprints = rows.fingerprint_of()
    journal = f"{task.attempt}-{uuid4().hex[:8]}"
    shard = host.engine.open(task.shard_id, asked, host.shelf().local(adapter_ids), task.rows_behind)
    try:
        while len(answers) < sum(isinstance(r, Request) for r in rows.requests):
            fresh = [_row_answer(s, requests, fingerprints, task) for s in shard.take(FLUSH_INTERVAL_S)]
            answers.update(fresh)
            if fresh and shard.num_unfinished:
                host.store.append_wip(task.shard_id, journal, encode_answers(answer for _, answer in fresh))
    finally:
        host.engine.abandon(shard)


def _row_answer(
    served: ServedRow, requests: Mapping[str, Request], fingerprints: Mapping[str, bytes], task: ShardTask
) -> tuple[str, RowAnswer]:
    request_id = served.result.request_id
    attempts = task.attempt + 1 + served.num_crashes
    request = requests[request_id]
    return request_id, RowAnswer.from_result(fingerprints[request_id], request, served.result, attempts)


def _outcome(host: EngineHost, rows: ShardRows, answers: Mapping[str, RowAnswer], num_reused: int) -> ShardOutcome:
    num_errors = sum(isinstance(r, RowError) for r in rows.requests)
    num_errors += sum(answer.finish_reason == "error" for answer in answers.values())
    return ShardOutcome(
        shard_id=rows.shard_id,
        worker=host.address,
        num_rows=rows.num_rows,
        num_errors=num_errors,
        num_reused=num_reused,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers.values()),
        completion_tokens=sum(answer.completion_tokens for answer in answers.values()),
    )
