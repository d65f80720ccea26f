"""`run_shard`: the Dask task that turns one shard into one part.

The task leaves the worker's thread pool at once and waits for the engine; any number of shards may be open on a worker.
Answers and begun rows that earlier attempts have left in the output are reused (`read_kept`). Finished rows are
journalled about once a second, begun rows when the worker has to leave. The part is written in one piece at the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from uuid import uuid4

from distributed import get_worker, secede

from ...engine.request import ExportedRow, Request
from ...jobs.parts import PartMark, read_mark
from ...jobs.progress import AdapterCount
from ...jobs.record import JobRecord, is_version_id
from ...jobs.spec import JobSpec
from ...jobs.store import JobStore
from ...scheduler.messages import RunShard
from ...scheduler.planning.bound import JobWork
from ..dataset.answers import AnswerKey, BegunRow, RowAnswer, decode_journal, encode_answers
from ..dataset.earlier import EarlierAnswers
from ..dataset.index import spelling
from ..dataset.reader import ShardReader, ShardRows
from ..dataset.writer import answers_in_part, part_bytes
from ..messages import PromptReuse, ShardAbandonedError, ShardOutcome
from ..supervisor.open_shard import ServedRow
from ..supervisor.queue import EngineQueue
from .plugin import RunPlugin, find_plugin
from .run_stages import answer_stages, keep_staged, mark_of
from .shard_outcome import FLUSH_INTERVAL_S, PAUSE_S, AwaitedAdapters, journals_of, keep_begun, work_of


def run_shard(run_id: str, command: RunShard) -> None:
    """Run one shard of a run here and commit it, or wait for the attempt that this worker has open already. The shard's
    `ShardOutcome` is published.

    Raises `ShardAbandonedError` when the worker stops first (finished and begun rows stay in `wip`),
    `EngineFailedError` when the engine cannot be kept alive, `StorageError` when storage fails, `OutputConflictError`
    when the output is another job's by now.
    """
    secede()
    plugin = find_plugin(get_worker(), run_id)
    with plugin.claimed(command.shard_id) as (claim, is_ours):
        if is_ours:
            claim.set_result(_answer_and_commit(plugin, command, run_id))
        outcome = claim.result()
    plugin.publish_outcome(outcome)


def _answer_and_commit(plugin: RunPlugin, command: RunShard, run_id: str) -> ShardOutcome:
    plugin.check_output()
    record, store = plugin.record(), plugin.store
    if record.spec.stages is not None:
        return answer_stages(plugin, command, run_id)
    rows = plugin.shards().rows(command.shard_id)
    done = read_done(plugin.store, record, rows)
    if done is not None:
        mark = read_mark(plugin.store, command.shard_id)
        num_reused = mark.reused_by(run_id) if isinstance(mark, PartMark) else 0
        return _outcome(plugin, rows, done, num_reused, JobWork())
    kept = read_kept(plugin.store, record, rows, run_id)
    if record.sources:
        kept.keep_earlier(rows, plugin.earlier().of(plugin.shards().sources(command.shard_id)))
    answers = kept.answers
    reused = frozenset(answers)
    asked = [r for r in rows.requests if isinstance(r, Request) and r.request_id not in answers]
    if unread := unread_adapters(rows, store):
        for found in plugin.adapters(unread, command.adapter_fetches):
            plugin.release(found.values())
    if asked:
        needed = [r.adapter_id for r in asked if r.adapter_id]
        with closing(AwaitedAdapters(plugin, needed, command.adapter_fetches)) as adapters:
            adapters.rows = [kept.begun.get(r.request_id, ExportedRow(r)) for r in asked]
            _answer(plugin, rows, adapters, kept, command, run_id)
    part = part_bytes(rows, answers, record, run_id, len(kept.earlier), plugin.spelling(), store.content_of)
    plugin.check_output()
    while not plugin.store.commit_part(command.shard_id, part) and read_done(plugin.store, record, rows) is None:
        # A worker of an earlier run with other adapters was faster; or this worker's run is the earlier one, for which
        # the check raises.
        plugin.check_output()
        plugin.store.remove_part(command.shard_id)
    fresh = {request_id: answer for request_id, answer in answers.items() if request_id not in reused}
    given = {r.request_id: ExportedRow(r, r.sampling.continuation_token_ids[:-1]) for r in asked if r.sampling.is_given}
    return _outcome(plugin, rows, answers, len(kept.earlier), work_of(fresh, kept.begun | given))


def _come(rows: ShardRows, adapters: AwaitedAdapters, kept: KeptRows) -> list[ExportedRow]:
    """Rows whose adapters have come. Those whose adapters cannot be used become error rows in `kept.answers`."""
    come = adapters.come()
    refused = {id_: why for id_, why in adapters.found.items() if isinstance(why, str)}
    if refused and come:
        fingerprints = rows.fingerprint_of()
        pairs = zip(rows.requests, rows.adapters, strict=True)
        names = {r.request_id: name for r, name in pairs if isinstance(r, Request)}
        for request in (row.request for row in come if row.request.adapter_id in refused):
            fingerprint, num_tokens = fingerprints[request.request_id], len(request.prompt_token_ids)
            error = f"adapter={names[request.request_id]!r}: {refused[request.adapter_id or '']}"
            kept.answers[request.request_id] = RowAnswer.refused(fingerprint, request.adapter_id, error, num_tokens)
    return [row for row in come if row.request.adapter_id not in refused]


def _answer(
    plugin: RunPlugin, rows: ShardRows, adapters: AwaitedAdapters, kept: KeptRows, command: RunShard, run_id: str
) -> None:
    """Have the engine answer the rows that wait for adapters, each once its adapter is here, and add the answers to
    `kept.answers`.
    """
    come: list[ExportedRow] = []
    while adapters.rows and not come:
        come = _come(rows, adapters, kept)
    if not come:
        return
    fingerprints = rows.fingerprint_of()
    requests = {r.request_id: r for r in rows.requests if isinstance(r, Request)}
    journal = f"{journals_of(run_id)}{command.attempt}-{uuid4().hex[:8]}"
    shard = adapters.open(command, come)
    turn_s = time.monotonic()
    try:
        while len(kept.answers) < len(requests):
            while adapters.rows and time.monotonic() - turn_s < FLUSH_INTERVAL_S:
                adapters.extend(shard, _come(rows, adapters, kept))
            served = shard.take(0 if adapters.rows else FLUSH_INTERVAL_S)
            fresh = [_row_answer(row, requests, fingerprints, command) for row in served]
            plugin.engine.check_model()
            kept.answers.update(fresh)
            if time.monotonic() - turn_s > PAUSE_S:
                plugin.check_output()
            turn_s = time.monotonic()
            if fresh and shard.planned_rows_left:
                plugin.store.append_wip(command.shard_id, journal, encode_answers(answer for _, answer in fresh))
    except ShardAbandonedError:
        keep_begun(plugin, shard, fingerprints.__getitem__, journal)
        raise
    finally:
        plugin.engine.submit(EngineQueue.abandon, shard)


def _row_answer(
    served: ServedRow, requests: Mapping[str, Request], fingerprints: Mapping[str, bytes], command: RunShard
) -> tuple[str, RowAnswer]:
    request_id = served.result.request_id
    attempts = command.attempt + 1 + served.num_crashes
    request = requests[request_id]
    return request_id, RowAnswer.from_result(fingerprints[request_id], request, served.result, attempts)


def _outcome(
    plugin: RunPlugin, rows: ShardRows, answers: Mapping[str, RowAnswer], num_reused: int, work: JobWork
) -> ShardOutcome:
    num_errors = sum(isinstance(r, RowAnswer) for r in rows.requests)
    num_errors += sum(answer.finish_reason == "error" for answer in answers.values())
    return ShardOutcome(
        shard_id=rows.shard_id,
        worker=plugin.address,
        num_rows=rows.num_rows,
        num_errors=num_errors,
        num_reused=num_reused,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers.values()),
        completion_tokens=sum(answer.completion_tokens for answer in answers.values()),
        reuse=PromptReuse.of_answers(answers.values()),
        work=work,
        adapters=tuple(_by_adapter(rows, answers)),
    )


def _by_adapter(rows: ShardRows, answers: Mapping[str, RowAnswer]) -> Iterator[AdapterCount]:
    answered = [r if isinstance(r, RowAnswer) else answers[r.request_id] for r in rows.requests]
    of_adapter: defaultdict[str, list[RowAnswer]] = defaultdict(list)
    for name, answer in zip(rows.adapters, answered, strict=True):
        of_adapter[name or ""].append(answer)
    for name, group in of_adapter.items():
        num_errors = sum(answer.finish_reason == "error" for answer in group)
        num_cut = sum(answer.finish_reason == "length" for answer in group)
        yield AdapterCount(name, len(group), num_errors, sum(answer.completion_tokens for answer in group), num_cut)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows of a shard that earlier attempts have finished or begun, by request id."""

    #: Answers.
    answers: dict[str, RowAnswer] = field(default_factory=dict)
    #: Rows with the tokens that were generated for them.
    begun: dict[str, ExportedRow] = field(default_factory=dict)
    #: Request ids of rows with an answer of an earlier run.
    earlier: set[str] = field(default_factory=set)

    def keep_earlier(self, rows: ShardRows, answers: Mapping[AnswerKey, RowAnswer]) -> None:
        """Keep the answers of earlier jobs that hold. `answers`: by fingerprint and adapter."""
        for request, fingerprint in zip(rows.requests, rows.fingerprints, strict=True):
            if isinstance(request, RowAnswer):
                continue
            answer = answers.get((fingerprint, request.adapter_id))
            if answer is not None and request.request_id not in self.answers:
                self.answers[request.request_id] = answer
                self.earlier.add(request.request_id)


def read_kept(store: JobStore, record: JobRecord, rows: ShardRows, run_id: str = "") -> KeptRows:
    """Rows that still hold, from a shard's journals and from its part. `run_id`: id of the run that reads. For shards
    for which `read_done` is None.

    A part of such a shard was written by a worker of an earlier run that went on for too long. Its rows that hold are
    journalled first, then it is removed, so that nothing is lost in between.
    """
    asked: defaultdict[AnswerKey, list[Request]] = defaultdict(list)
    for request, fingerprint in zip(rows.requests, rows.fingerprints, strict=True):
        if isinstance(request, Request):
            asked[fingerprint, request.adapter_id].append(request)
    kept = KeptRows()
    for name, journal in store.read_wip(rows.shard_id).items():
        is_earlier = not name.startswith(journals_of(run_id))
        for row in decode_journal(journal):
            # none when the row has changed, or its adapter; several for adapters of one content
            for request in asked.get((row.fingerprint, row.adapter_sha256), ()):
                if isinstance(row, BegunRow):
                    _begin(kept, request, row)
                elif row.error is None:
                    # Errors are not kept: another attempt may do better.
                    kept.answers[request.request_id] = row
                    if is_earlier:
                        kept.earlier.add(request.request_id)
    if store.is_committed(rows.shard_id):
        with store.open_part(rows.shard_id) as part:
            in_part = answers_in_part(part, rows, record, store.content_of) or {}
        kept.answers.update(in_part)
        kept.earlier.update(in_part)
        store.append_wip(rows.shard_id, f"part-{uuid4().hex[:8]}", encode_answers(in_part.values()))
        store.remove_part(rows.shard_id)
    return kept


def keep_shards(shard_ids: Sequence[int], store: JobStore, record: JobRecord, spec: JobSpec, run_id: str) -> int:
    """Write the parts of an update's shards whose rows all keep their answers, or cannot be answered: no engine is
    needed. Returns the number of parts written. Safe to repeat, and to run twice at once.

    `spec`: the job's options with those of storage. Raises `StorageError`, and `OutputConflictError` when the output is
    another job's by now.
    """
    spell = spelling(record, spec.model, spec.storage_options)
    earlier = EarlierAnswers([store.source(name) for name in record.sources])
    num_written = 0
    with closing(ShardReader(store, record)) as shards:
        for shard_id in shard_ids:
            rows = shards.rows(shard_id)
            if record.spec.stages is not None:
                is_there = mark_of(store, record, rows) is not None
                num_written += not is_there and keep_staged(rows, store, record, spec, run_id, earlier)
                continue
            if read_done(store, record, rows) is not None:
                continue
            kept = read_kept(store, record, rows, run_id)
            kept.keep_earlier(rows, earlier.of(shards.sources(shard_id)))
            if any(isinstance(r, Request) and r.request_id not in kept.answers for r in rows.requests):
                continue  # a part of before was lost meanwhile
            if unread_adapters(rows, store):
                continue
            part = part_bytes(rows, kept.answers, record, run_id, len(kept.earlier), spell, store.content_of)
            store.check_current(record)
            num_written += store.commit_part(shard_id, part)
    return num_written


def unread_adapters(rows: ShardRows, store: JobStore) -> set[str]:
    """Adapters of error rows whose content no one has read yet: parts name the adapters of all rows by content."""
    of_errors = {r.adapter_sha256 for r in rows.requests if isinstance(r, RowAnswer)}
    return {each for each in of_errors if each and is_version_id(each) and store.adapter_content(each) is None}


def read_done(store: JobStore, record: JobRecord, rows: ShardRows) -> dict[str, RowAnswer] | None:
    """The answers of the shard's part, errors included; None when there is no part, or some answers do not hold."""
    if not store.is_committed(rows.shard_id):
        return None
    with store.open_part(rows.shard_id) as part:
        answers = answers_in_part(part, rows, record, store.content_of, with_errors=True)
    num_asked = sum(isinstance(request, Request) for request in rows.requests)
    return None if answers is None or len(answers) < num_asked else answers


def _begin(kept: KeptRows, request: Request, row: BegunRow) -> None:
    """Keep a begun row, unless another attempt has generated more tokens for it."""
    begun = ExportedRow(request, row.token_ids, row.token_logprobs, row.top_logprobs, row.teacher)
    before = kept.begun.get(request.request_id)
    if not begun.problems() and (before is None or len(before.token_ids) < len(begun.token_ids)):
        kept.begun[request.request_id] = begun
