"""Answers a shard of a job with stages and commits its part: the counterpart of `run_shard` for such jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from uuid import uuid4

import pyarrow as pa

from ...engine.request import ExportedRow
from ...jobs.input.columns import DEFAULT_ID_COLUMN
from ...jobs.parts import PartMark, read_mark
from ...jobs.progress import AdapterCount
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from ...jobs.store import JobStore
from ...scheduler.messages import RunShard
from ...scheduler.planning.bound import JobWork
from ..dataset.answers import BegunRow, RowAnswer, decode_journal, encode_answers
from ..dataset.earlier import EarlierAnswers, decompressed
from ..dataset.fingerprints import id_hash
from ..dataset.index import spelling, tokenizer_of
from ..dataset.reader import ShardRows
from ..dataset.staged_writer import counted_requests, staged_part_bytes
from ..messages import PromptReuse, ShardAbandonedError, ShardOutcome
from ..supervisor.open_shard import ServedRow
from ..supervisor.queue import EngineQueue
from .plugin import RunPlugin
from .shard_outcome import FLUSH_INTERVAL_S, PAUSE_S, AwaitedAdapters, journals_of, keep_begun, work_of
from .staged_shard import KeptAnswers, StagedShard

# Seconds after which results are looked at, so that what follows from them reaches the engine before its batch is
# empty.
_TURN_S = 0.1


def answer_stages(plugin: RunPlugin, command: RunShard, run_id: str) -> ShardOutcome:
    """Answer all stages of a shard's rows and commit the part, unless it is there. Raises what `run_shard` raises."""
    record, shard_id = plugin.record(), command.shard_id
    rows = plugin.shards().rows(shard_id)
    mark = mark_of(plugin.store, record, rows)
    if mark is not None:
        return _outcome(plugin, rows, mark, mark.reused_by(run_id), JobWork(), [])
    kept = with_earlier(read_kept_answers(plugin.store, shard_id, run_id), rows, record, plugin.earlier())
    staged = StagedShard(rows, record, plugin.spec(), kept, tokenizer_of)
    first = staged.begin()
    if first:
        needed = [row.request.adapter_id for row in first if row.request.adapter_id] + sorted(staged.adapter_ids)
        with closing(AwaitedAdapters(plugin, needed, command.adapter_fetches)) as adapters:
            _answer(plugin, staged, first, adapters, command, run_id)
    spell, content_of = plugin.spelling(), plugin.store.content_of
    part = staged_part_bytes(rows, staged.programs, record, run_id, staged.num_reused, spell, content_of)
    plugin.check_output()
    plugin.store.write_answers(shard_id, _compressed(staged))
    while not plugin.store.commit_part(shard_id, part) and mark_of(plugin.store, record, rows) is None:
        plugin.check_output()
        plugin.store.remove_part(shard_id)
    mark = mark_of(plugin.store, record, rows)
    fresh = {str(number): staged.answers[fingerprint] for number, fingerprint in enumerate(staged.fresh)}
    work = work_of(fresh, {})
    return _outcome(plugin, rows, mark or PartMark(), staged.num_reused, work, list(fresh.values()))


def mark_of(store: JobStore, record: JobRecord, rows: ShardRows) -> PartMark | None:
    """The mark of the shard's part; None when there is none, or it is not what the shard would be today."""
    if not store.is_committed(rows.shard_id):
        return None
    mark = read_mark(store, rows.shard_id)
    is_ours = isinstance(mark, PartMark) and not mark.problem(rows.shard_id, record, rows.contents(record))
    return mark if isinstance(mark, PartMark) and is_ours else None


def read_kept_answers(store: JobStore, shard_id: int, run_id: str) -> KeptAnswers:
    """Answers and begun requests of a shard that earlier attempts have left, errors left out."""
    answers: dict[bytes, RowAnswer] = {}
    begun: dict[bytes, BegunRow] = {}
    earlier: set[bytes] = set()
    journals = {"": decompressed(store.read_answers(shard_id)), **store.read_wip(shard_id)}
    for name, journal in journals.items():
        for row in decode_journal(journal):
            if isinstance(row, BegunRow):
                before = begun.get(row.fingerprint)
                if before is None or len(before.token_ids) < len(row.token_ids):
                    begun[row.fingerprint] = row
            elif row.error is None:
                answers[row.fingerprint] = row
                if not name.startswith(journals_of(run_id)):
                    earlier.add(row.fingerprint)
    return KeptAnswers(answers, begun, earlier)


def keep_staged(
    rows: ShardRows, store: JobStore, record: JobRecord, spec: JobSpec, run_id: str, earlier: EarlierAnswers
) -> bool:
    """Write the part of an update's shard whose requests all have answers. Returns whether it was written."""
    kept = with_earlier(read_kept_answers(store, rows.shard_id, run_id), rows, record, earlier)
    staged = StagedShard(rows, record, spec, kept, tokenizer_of)
    if staged.begin():
        return False
    spell = spelling(record, spec.model, spec.storage_options)
    part = staged_part_bytes(rows, staged.programs, record, run_id, staged.num_reused, spell, store.content_of)
    store.check_current(record)
    store.write_answers(rows.shard_id, _compressed(staged))
    return store.commit_part(rows.shard_id, part)


def with_earlier(kept: KeptAnswers, rows: ShardRows, record: JobRecord, earlier: EarlierAnswers) -> KeptAnswers:
    """The kept answers together with those of the jobs that an update keeps answers of."""
    if not record.sources:
        return kept
    ids = rows.table.column(record.input.roles.get("id", DEFAULT_ID_COLUMN)).to_pylist()
    found = earlier.of_stages(map(id_hash, ids), record)
    return KeptAnswers({**found, **kept.answers}, kept.begun, {*found, *kept.earlier})


def _compressed(staged: StagedShard) -> bytes:
    """Answers of a shard as they are kept beside its part."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(encode_answers(staged.answers.values()))
    return bytes(sink.getvalue())


def _answer(
    plugin: RunPlugin,
    staged: StagedShard,
    first: list[ExportedRow],
    adapters: AwaitedAdapters,
    command: RunShard,
    run_id: str,
) -> None:
    """Have the engine answer requests, each once its adapter is here, until no stage of any row has one left."""
    journal = f"{journals_of(run_id)}{command.attempt}-{uuid4().hex[:8]}"
    names = {adapter.sha256: adapter.name for adapter in plugin.record().adapters}

    def ready(requests: list[ExportedRow]) -> tuple[list[ExportedRow], list[int]]:
        """Those of the requests for the engine whose adapters have come, and rows that are done by refusals."""
        whys = adapters.found.items()
        refused = {id_: f"adapter={names[id_]!r}: {why}" for id_, why in whys if isinstance(why, str)}
        requests, done = staged.refuse(requests, refused)
        return adapters.ready(requests), done

    adapters.rows, come = first, list[ExportedRow]()
    while adapters.rows and not come:
        come, _ = ready(adapters.come())
    if not come:
        return
    rows_left = sum(not program.is_done for program in staged.programs)
    shard = adapters.open(command, come, rows_left)
    num_open, unsaved = len(come), list[RowAnswer]()
    turn_s = saved_s = time.monotonic()

    def save() -> None:
        if unsaved:
            plugin.store.append_wip(command.shard_id, journal, encode_answers(unsaved))
            unsaved.clear()

    try:
        while num_open or adapters.rows:
            come, done = ready(adapters.come()) if adapters.rows else ([], [])
            answers = [_answered(staged, served, command) for served in shard.take(0 if adapters.rows else _TURN_S)]
            plugin.engine.check_model()
            following, done_rows = staged.take(answers)
            following, refused_rows = ready(following)
            come, done = come + following, done + done_rows + refused_rows
            adapters.extend(shard, come)
            if done:
                plugin.engine.submit(EngineQueue.rows_done, shard, [staged.length_of(row) for row in done])
            num_open += len(come) - len(answers)
            unsaved += [answer for _, answer in answers]
            now_s = time.monotonic()
            if now_s - turn_s > PAUSE_S:
                plugin.check_output()
            turn_s = now_s
            if (num_open or adapters.rows) and now_s - saved_s > FLUSH_INTERVAL_S:
                save()
                saved_s = time.monotonic()
    except ShardAbandonedError:
        plugin.check_output()
        save()
        keep_begun(plugin, shard, staged.fingerprint_of, journal)
        raise
    finally:
        plugin.engine.submit(EngineQueue.abandon, shard)


def _answered(staged: StagedShard, served: ServedRow, command: RunShard) -> tuple[str, RowAnswer]:
    """Id of a request that an engine has answered, and the answer."""
    request_id = served.result.request_id
    request, fingerprint = staged.request(request_id), staged.fingerprint_of(request_id)
    attempts = command.attempt + 1 + served.num_crashes
    return request_id, RowAnswer.from_result(fingerprint, request, served.result, attempts)


def _outcome(
    plugin: RunPlugin, rows: ShardRows, mark: PartMark, num_reused: int, work: JobWork, fresh: list[RowAnswer]
) -> ShardOutcome:
    requests = counted_requests(mark.requests)
    return ShardOutcome(
        shard_id=rows.shard_id,
        worker=plugin.address,
        num_rows=rows.num_rows,
        num_errors=mark.num_errors,
        num_reused=num_reused,
        prompt_tokens=sum(one["prompt_tokens"] for one in requests),
        completion_tokens=sum(one["completion_tokens"] for one in requests),
        reuse=PromptReuse.of_answers(fresh),
        work=work,
        adapters=tuple(_by_adapter(rows, requests)),
    )


def _by_adapter(rows: ShardRows, requests: list[dict[str, object]]) -> Iterator[AdapterCount]:
    """Rows of the shard by the adapter of their first stage, with the errors and tokens of all requests of adapters."""
    num_rows: defaultdict[str, int] = defaultdict(int)
    for name in rows.adapters:
        num_rows[name or ""] += 1
    for name, count in num_rows.items():
        of_adapter = [one for one in requests if (one["adapter"] or "") == name]
        num_errors = sum(one["error"] is not None for one in of_adapter)
        tokens = sum(int(str(one["completion_tokens"])) for one in of_adapter)
        yield AdapterCount(name, count, min(num_errors, count), tokens)
