"""Answers a shard of a job with stages and commits its part: the counterpart of `run_shard` for such jobs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from uuid import uuid4

import pyarrow as pa

from ...engine.request import ExportedRow
from ...jobs.parts import PartMark, read_mark
from ...jobs.progress import AdapterCount
from ...scheduler.messages import RunShard
from ...scheduler.planning.bound import JobWork
from ..dataset.answers import BegunRow, RowAnswer, decode_journal, encode_answers, encode_begun
from ..dataset.index import tokenizer_of
from ..dataset.reader import ShardRows
from ..dataset.staged_writer import counted_requests, staged_part_bytes
from ..messages import PromptReuse, ShardAbandonedError, ShardOutcome
from ..supervisor.open_shard import OpenShard
from ..supervisor.queue import EngineQueue
from .plugin import RunPlugin
from .shard_outcome import FLUSH_INTERVAL_S, PAUSE_S, journals_of, work_of
from .staged_shard import KeptAnswers, StagedShard


def answer_stages(plugin: RunPlugin, command: RunShard, run_id: str) -> ShardOutcome:
    """Answer all stages of a shard's rows and commit the part, unless it is there. Raises what `run_shard` raises."""
    record, shard_id = plugin.record(), command.shard_id
    rows = plugin.shards().rows(shard_id)
    mark = _mark_of(plugin, rows)
    if mark is not None:
        return _outcome(plugin, rows, mark, mark.reused_by(run_id), JobWork(), [])
    staged = StagedShard(rows, record, plugin.spec(), read_kept_answers(plugin, shard_id, run_id), tokenizer_of)
    first = staged.begin()
    if first:
        _answer(plugin, staged, first, command, run_id)
    part = staged_part_bytes(rows, staged.programs, record, run_id, staged.num_reused, plugin.spelling())
    plugin.check_output()
    kept = pa.compress(encode_answers(staged.answers.values()), codec="zstd", asbytes=True)
    plugin.store.write_answers(shard_id, kept)
    while not plugin.store.commit_part(shard_id, part) and _mark_of(plugin, rows) is None:
        plugin.check_output()
        plugin.store.remove_part(shard_id)
    mark = _mark_of(plugin, rows)
    fresh = {str(number): staged.answers[fingerprint] for number, fingerprint in enumerate(staged.fresh)}
    work = work_of(fresh, {})
    return _outcome(plugin, rows, mark or PartMark(), staged.num_reused, work, list(fresh.values()))


def _mark_of(plugin: RunPlugin, rows: ShardRows) -> PartMark | None:
    """The mark of the shard's part; None when there is none, or it is not what the shard would be today."""
    if not plugin.store.is_committed(rows.shard_id):
        return None
    mark = read_mark(plugin.store, rows.shard_id)
    record = plugin.record()
    is_ours = isinstance(mark, PartMark) and not mark.problem(rows.shard_id, record, rows.contents(record))
    return mark if isinstance(mark, PartMark) and is_ours else None


def read_kept_answers(plugin: RunPlugin, shard_id: int, run_id: str) -> KeptAnswers:
    """Answers and begun requests of a shard that earlier attempts have left, errors left out."""
    answers: dict[bytes, RowAnswer] = {}
    begun: dict[bytes, BegunRow] = {}
    earlier: set[bytes] = set()
    journals = {"kept": _decompressed(plugin.store.read_answers(shard_id)), **plugin.store.read_wip(shard_id)}
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


def _decompressed(data: bytes) -> bytes:
    if not data:
        return b""
    try:
        return bytes(pa.input_stream(pa.BufferReader(data), compression="zstd").read())
    except (pa.ArrowInvalid, OSError):
        return b""  # cut or damaged: its answers are computed again


def _answer(plugin: RunPlugin, staged: StagedShard, first: list[ExportedRow], command: RunShard, run_id: str) -> None:
    """Have the engine answer requests until no stage of any row has one left."""
    journal = f"{journals_of(run_id)}{command.attempt}-{uuid4().hex[:8]}"
    fetches = command.adapter_fetches
    sources = {fetch.adapter_id: source for fetch in fetches if (source := fetch.from_replica_id) is not None}
    adapters = plugin.adapters(staged.adapter_ids, sources)
    shard = plugin.engine.open(command.shard_id, first, adapters, command.rows_behind)
    turn_s = time.monotonic()
    num_open = len(first)
    try:
        while num_open:
            answers: list[tuple[str, RowAnswer]] = []
            for served in shard.take(FLUSH_INTERVAL_S):
                request_id = served.result.request_id
                request, fingerprint = staged.request(request_id), staged.fingerprint_of(request_id)
                attempts = command.attempt + 1 + served.num_crashes
                answers.append((request_id, RowAnswer.from_result(fingerprint, request, served.result, attempts)))
            plugin.engine.check_model()
            following = staged.take(answers)
            if following:
                plugin.engine.extend(shard, following)
            num_open += len(following) - len(answers)
            if time.monotonic() - turn_s > PAUSE_S:
                plugin.check_output()
            turn_s = time.monotonic()
            if answers and num_open:
                fresh = encode_answers(answer for _, answer in answers)
                plugin.store.append_wip(command.shard_id, journal, fresh)
    except ShardAbandonedError:
        _keep_begun(plugin, shard, staged, journal)
        raise
    finally:
        plugin.engine.submit(EngineQueue.abandon, shard)


def _keep_begun(plugin: RunPlugin, shard: OpenShard, staged: StagedShard, journal: str) -> None:
    begun = [
        BegunRow(
            staged.fingerprint_of(row.request.request_id),
            row.request.adapter_id,
            row.token_ids,
            row.token_logprobs,
            row.top_logprobs,
        )
        for row in shard.begun
    ]
    if begun and shard.shard_id is not None:
        plugin.check_output()
        plugin.store.append_wip(shard.shard_id, journal, encode_begun(begun))


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
