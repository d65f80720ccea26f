"""Writes a shard's rows and answers as the bytes of its part file, and reads the answers back.

A part holds the input's columns with their exact types, then those of the answers. Its schema is the same in every part
of a job, so that readers may take the folder as one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...engine.errors import RUN_AGAIN
from ...engine.request import Request, TopLogprobs
from ...jobs.input import teacher
from ...jobs.input.answer_type import answer_type
from ...jobs.input.columns import (
    ASKED_FIELDS,
    CHOICE_FIELD,
    CHOICE_SCORES_FIELD,
    CHOICE_SHARES_FIELD,
    DEFAULT_ID_COLUMN,
    LOGPROB_FIELDS,
    RIGHT_SCORE_FIELD,
    SCORE_FIELD,
    TYPED_COLUMN,
    answer_fields,
    completion_fields,
    copied_schema,
    expected_field,
    output_name,
    readable_values,
    records_samples,
    right_column,
    sample_field,
)
from ...jobs.input.completions import OF_ROWS, as_lists, completions
from ...jobs.input.scores import right_answers, score_of
from ...jobs.input.stage_columns import output_fields
from ...jobs.parts import PartMark, answers_hash, contents_of, counted_columns, damage_of
from ...jobs.record import JobRecord
from .answers import RowAnswer, probabilities
from .column_values import template_values
from .reader import ShardRows
from .schema import SAMPLE, passthrough_schema
from .task_columns import POOLED_COLUMNS, pooled_of, right_labels, task_columns

#: Function of an adapter (None: the base model) and tokens that returns the bytes of each; None if they are not known.
Spell = Callable[[str | None, Sequence[int]], list[bytes] | None]
#: Function of an adapter's identity (None: the base model) that returns its content hash; see `JobStore.content_of`.
ContentOf = Callable[[str | None], str | None]
_TEXTS, _BYTES = LOGPROB_FIELDS[2:]
_TOPS = ASKED_FIELDS["top_logprobs"]
_PROMPT, _PROMPT_TOPS = ASKED_FIELDS["prompt_logprobs"], ASKED_FIELDS["prompt_top_logprobs"]


def part_bytes(
    rows: ShardRows,
    finished: Mapping[str, RowAnswer],
    record: JobRecord,
    run_id: str = "",
    num_reused: int = 0,
    spell: Spell | None = None,
    content_of: ContentOf = lambda adapter_id: adapter_id,
) -> memoryview:
    """The Parquet file of one shard. `finished`: request id -> answer, for every row that is a `Request`. `num_reused`:
    answers in `finished` that runs before `run_id` computed. `spell`: None leaves tokens without texts and bytes.

    Raises AssertionError naming a row when an answer is missing: parts are never written in pieces.
    """
    missing = [r.request_id for r in rows.requests if not isinstance(r, RowAnswer) and r.request_id not in finished]
    assert not missing, f"shard {rows.shard_id}: {len(missing)} rows have no answer, first {missing[0]}"
    found = [request if isinstance(request, RowAnswer) else finished[request.request_id] for request in rows.requests]
    answers = with_contents(found, content_of)
    table = _with_answers(rows, answers, record, spell or (lambda adapter, token_ids: None))
    num_curable = sum(RUN_AGAIN in (answer.error or "") for answer in answers)
    counts = {"num_completions": rows.num_rows, "num_reused": num_reused, "num_curable": num_curable}
    return finished_part(table, rows, record, run_id, **counts)


def with_contents(answers: Iterable[RowAnswer], content_of: ContentOf) -> list[RowAnswer]:
    """The answers with the content hashes of their adapters in place of identities."""
    return [
        answer
        if (content := content_of(answer.adapter_sha256)) == answer.adapter_sha256
        else replace(answer, adapter_sha256=content)
        for answer in answers
    ]


def finished_part(table: pa.Table, rows: ShardRows, record: JobRecord, run_id: str, **counts: Any) -> memoryview:
    """The Parquet file of a shard's table with the mark of its job. `counts`: fields of `PartMark`."""
    made_of = {"contents": rows.contents(record), "answers": _answers_hash(table, record)}
    mark = _mark(record, run_id, rows.shard_id, **made_of, **counts)
    return _parquet(table.replace_schema_metadata(_metadata(record) | mark.metadata()), record)


def wide_file(table: pa.Table, record: JobRecord) -> memoryview:
    """The Parquet file of a wide table; its options are those of parts, and it has no mark."""
    return _parquet(table.replace_schema_metadata(_metadata(record)), record)


def _mark(record: JobRecord, run_id: str, shard_id: int, **values: Any) -> PartMark:
    return PartMark(
        job_id=record.job_id,
        run_id=run_id,
        shard_id=str(shard_id),
        model_sha256=record.model.sha256,
        tokenizer_sha256=record.model.tokenizer_sha256,
        **values,
    )


def _answers_hash(part: pa.Table, record: JobRecord) -> str:
    columns = counted_columns(record)
    return answers_hash({name: readable_values(part.column(column)) for name, column in columns.items()})


def part_schema(prepared_schema: pa.Schema, ours: Sequence[pa.Field]) -> pa.Schema:
    """The schema of every part of a job whose prepared rows have `prepared_schema`. `ours`: fields of the answers."""
    return pa.schema([*passthrough_schema(prepared_schema), *ours])


def output_schema(record: JobRecord) -> pa.Schema:
    """The schema of every part of a job, also of one that has no rows and no parts."""
    columns = copied_schema(record)
    if "id" not in record.input.roles:
        columns = columns.append(pa.field(DEFAULT_ID_COLUMN, pa.string()))
    if (expected := expected_field(record)) is not None:
        columns = columns.append(expected)
    if records_samples(record):
        columns = columns.append(sample_field(record))
    return part_schema(columns, output_fields(record))


def empty_part(record: JobRecord, run_id: str) -> memoryview:
    """The one part of a job without rows, in which readers of the output find its columns."""
    table = pa.Table.from_batches([], output_schema(record))
    mark = _mark(record, run_id, 0, contents=contents_of(record, ()), answers=_answers_hash(table, record))
    return _parquet(table.replace_schema_metadata(_metadata(record) | mark.metadata()), record)


def answers_in_part(
    part: BinaryIO,
    rows: ShardRows,
    record: JobRecord,
    content_of: ContentOf = lambda adapter_id: adapter_id,
    *,
    with_errors: bool = False,
) -> dict[str, RowAnswer] | None:
    """Answers of a committed part that still hold: request id -> answer. None when the part cannot be read or holds
    other rows than the shard's.

    A row's answer holds when the row's adapter has the same content today. Error rows are left out unless
    `with_errors`: the cause of the error may have been repaired.
    """
    id_column = record.input.roles.get("id", DEFAULT_ID_COLUMN)
    ids = rows.table.column(id_column)
    if record.has_lists:
        ids = ids.take(pa.array(_first_of_rows(rows)))
    try:
        table = pq.read_table(part)
        mark = PartMark.of(table.schema)
    except Exception as error:
        damage_of(error)
        return None
    is_ours = (mark.job_id, mark.shard_id) == (record.job_id, str(rows.shard_id))
    if not is_ours or not table.column(id_column).equals(ids):
        return None
    answers = answer_values(table, record)
    return {
        request.request_id: row_answer(answer | {"adapter_sha256": request.adapter_id}, fingerprint)
        for request, fingerprint, answer in zip(rows.requests, rows.fingerprints, answers, strict=True)
        if not isinstance(request, RowAnswer)
        and (with_errors or answer["error"] is None)
        and answer["adapter_sha256"] == content_of(request.adapter_id)
    }


def has_answers_as_written(part: pa.Table, record: JobRecord) -> bool:
    """Whether a part, with all its columns, has the answers that its job wrote."""
    return _answers_hash(part, record) == PartMark.of(part.schema).answers


def answer_values(part: pa.Table, record: JobRecord) -> list[dict[str, Any]]:
    """The fields of `RowAnswer` of each completion in a part, as far as the table has their columns. The other columns
    of a part follow from these and from the request.
    """
    known = {*RowAnswer.__dataclass_fields__, *POOLED_COLUMNS}
    names = [field.name for field in completion_fields(record) if field.name in known]
    columns = {name: column for name in names if (column := output_name(record, name)) in part.column_names}
    answers: list[dict[str, Any]] = part.select(list(columns.values())).rename_columns(list(columns)).to_pylist()
    if record.has_lists:
        lists = {name for name in columns if name not in OF_ROWS}
        answers = [each for row in answers for each in completions(row, lists)]
    count = record.spec.sampling.teacher_top_k
    taught = [output_name(record, name) for name in (teacher.TOKENS, teacher.LOGPROBS)] if count else []
    if taught and {*taught} <= {*part.column_names}:
        places = teacher.packed_places(part.column(taught[0]), part.column(taught[1]), count)
        answers = [each | {"teacher": of_each} for each, of_each in zip(answers, places, strict=True)]
    return answers


def row_answer(values: dict[str, Any], fingerprint: bytes) -> RowAnswer:
    """The answer of a row with these values of `answer_values`, which are changed."""
    for name in ("token_ids", "token_logprobs"):
        values[name] = None if values.get(name) is None else tuple(values[name])
    if values.get("tool_calls") is not None:
        values["tool_calls"] = tuple((call["id"], call["name"], call["arguments"]) for call in values["tool_calls"])
    for name, first in ((_TOPS.name, 0), (_PROMPT_TOPS.name, 1)):
        if (tops := values.get(name)) is not None:
            values[name] = tuple(tuple((token["token_id"], token["logprob"]) for token in top) for top in tops[first:])
    if (prompt := values.get(_PROMPT.name)) is not None:
        values[_PROMPT.name] = tuple(token["logprob"] for token in prompt[1:])
    if (scores := values.get(CHOICE_SCORES_FIELD.name)) is not None:
        values[CHOICE_SCORES_FIELD.name] = tuple(score["logprob"] for score in scores)
    return RowAnswer(fingerprint=fingerprint, pooled=pooled_of(values), **values)


def _with_answers(rows: ShardRows, answers: list[RowAnswer], record: JobRecord, spell: Spell) -> pa.Table:
    schema = part_schema(rows.table.schema, answer_fields(record))
    kept = passthrough_schema(rows.table.schema).names
    right = template_values(rows.table.column(name).combine_chunks()) if (name := right_column(record)) else ()
    ours = answer_columns(rows.requests, answers, rows.adapters, record, spell, right)
    given = rows.table.select(kept)
    if record.has_lists:
        first = _first_of_rows(rows)
        given, ours = given.take(pa.array(first)), as_lists(ours, first, rows.num_rows)
    return pa.Table.from_arrays([*given.columns, *ours.values()], schema=schema)


def answer_columns(
    requests: Sequence[Request | RowAnswer],
    answers: Sequence[RowAnswer],
    names: Sequence[str | None],
    record: JobRecord,
    spell: Spell,
    right: Sequence[Any] = (),
) -> dict[str, pa.Array]:
    """`completion_fields` of some answers, each `[num_answers]`, by name. `names`: of the adapters, None for the base
    model. `right`: values of the column of right answers, in a job that has one.
    """

    def spelt(name: str | None, answer: RowAnswer) -> list[bytes] | None:
        return None if answer.token_ids is None else spell(name, answer.token_ids)

    made: dict[str, Callable[[], pa.Array]] = {
        TYPED_COLUMN: lambda: _typed_answers(requests, answers, record.spec.sampling.json_schema),
        _TEXTS.name: lambda: pa.array(map(_texts, map(spelt, names, answers)), _TEXTS.type),
        _BYTES.name: lambda: pa.array(map(spelt, names, answers), _BYTES.type),
        _TOPS.name: lambda: pa.array(
            (_tops(spell, name, a.token_top_logprobs) for name, a in zip(names, answers, strict=True)), _TOPS.type
        ),
        _PROMPT.name: lambda: pa.array(
            (_prompt(spell, *row) for row in zip(names, requests, answers, strict=True)), _PROMPT.type
        ),
        _PROMPT_TOPS.name: lambda: pa.array(
            (
                _with_first(_tops(spell, name, a.prompt_token_top_logprobs))
                for name, a in zip(names, answers, strict=True)
            ),
            _PROMPT_TOPS.type,
        ),
        SCORE_FIELD.name: lambda: pa.array(map(_score, requests, answers), SCORE_FIELD.type),
        CHOICE_FIELD.name: lambda: pa.array(map(_chosen, requests, answers), CHOICE_FIELD.type),
        CHOICE_SCORES_FIELD.name: lambda: pa.array(map(_choice_scores, requests, answers), CHOICE_SCORES_FIELD.type),
        CHOICE_SHARES_FIELD.name: lambda: pa.array(map(_choice_shares, requests, answers), CHOICE_SHARES_FIELD.type),
        **task_columns(requests, answers, names, record),
        RIGHT_SCORE_FIELD.name: lambda: _scores(requests, answers, names, right, record),
    }
    if count := record.spec.sampling.teacher_top_k:
        arrays = teacher.teacher_arrays([answer.teacher for answer in answers], count)
        arrays[teacher.PROMPT] = pa.array(map(_taught_prompt, requests, answers), pa.list_(pa.int32()))
        made |= {name: partial(arrays.__getitem__, name) for name in arrays}
    return {
        field.name: made[field.name]()
        if field.name in made
        else pa.array([getattr(answer, field.name) for answer in answers], type=field.type)
        for field in completion_fields(record)
    }


def _first_of_rows(rows: ShardRows) -> NDArray[np.int64]:
    """Places of the first completion of each row of the input; its other completions follow."""
    return np.flatnonzero(rows.table.column(SAMPLE).to_numpy() == 0)


def _texts(words: Sequence[bytes] | None) -> list[str] | None:
    return None if words is None else [word.decode("utf-8", "replace") for word in words]


def _tokens(spell: Spell, adapter: str | None, pairs: Sequence[tuple[int, float | None]]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, and with their texts and bytes where they are known."""
    words = spell(adapter, [token for token, _ in pairs])
    tokens = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
    if words is None:
        return tokens
    return [
        token | {"text": word.decode("utf-8", "replace"), "bytes": word}
        for token, word in zip(tokens, words, strict=True)
    ]


def _tops(spell: Spell, adapter: str | None, tops: Sequence[TopLogprobs] | None) -> list[list[dict[str, Any]]] | None:
    return None if tops is None else [_tokens(spell, adapter, top) for top in tops]


def _with_first(tops: list[list[dict[str, Any]]] | None) -> list[list[dict[str, Any]]] | None:
    """Likeliest tokens of a prompt, with an empty list for its first token, which none precede."""
    return None if tops is None else [[], *tops]


def _prompt(
    spell: Spell, adapter: str | None, request: Request | RowAnswer, answer: RowAnswer
) -> list[dict[str, Any]] | None:
    """The prompt's tokens, each with its log-probability after the tokens before it."""
    if isinstance(request, RowAnswer) or answer.prompt_token_logprobs is None:
        return None
    pairs = zip(request.prompt_token_ids, (None, *answer.prompt_token_logprobs), strict=True)
    return _tokens(spell, adapter, list(pairs))


def _taught_prompt(request: Request | RowAnswer, answer: RowAnswer) -> tuple[int, ...] | None:
    """The prompt's tokens beside the places of a completion; None where there are none."""
    return None if isinstance(request, RowAnswer) or answer.teacher is None else request.prompt_token_ids


def _score(request: Request | RowAnswer, answer: RowAnswer) -> float | None:
    is_scored = not isinstance(request, RowAnswer) and bool(request.sampling.continuation_token_ids)
    return math.fsum(answer.token_logprobs) if is_scored and answer.token_logprobs is not None else None


def _chosen(request: Request | RowAnswer, answer: RowAnswer) -> str | None:
    has_choice = not isinstance(request, RowAnswer) and bool(request.sampling.choice)
    return answer.completion if has_choice and answer.finish_reason == "stop" else None


def _choice_scores(request: Request | RowAnswer, answer: RowAnswer) -> list[dict[str, Any]] | None:
    if isinstance(request, RowAnswer) or answer.choice_logprobs is None:
        return None
    pairs = zip(request.sampling.choice, answer.choice_logprobs, strict=True)
    return [{"choice": text, "logprob": logprob} for text, logprob in pairs]


def _choice_shares(request: Request | RowAnswer, answer: RowAnswer) -> list[dict[str, Any]] | None:
    """The share of each text in the probability of all texts of the choice; None if that probability is 0."""
    if isinstance(request, RowAnswer) or answer.choice_logprobs is None:
        return None
    shares = probabilities(answer.choice_logprobs)
    if shares is None:
        return None
    pairs = zip(request.sampling.choice, shares, strict=True)
    return [{"choice": text, "probability": share} for text, share in pairs]


def _scores(
    requests: Sequence[Request | RowAnswer],
    answers: Sequence[RowAnswer],
    names: Sequence[str | None],
    right: Sequence[Any],
    record: JobRecord,
) -> pa.Array:
    """Score of each answer; null for errors, and for rows without a right answer."""
    score_by = record.spec.score_by
    found: list[float | None] = []
    for request, answer, name, value in zip(requests, answers, names, right, strict=True):
        if isinstance(request, RowAnswer) or answer.completion is None:
            found.append(None)
            continue
        rights, choice = right_labels(right_answers(value, score_by), request, answer, name, record)
        found.append(score_of(answer.completion, rights, score_by, choice))
    return pa.array(found, RIGHT_SCORE_FIELD.type)


def _typed_answers(requests: Sequence[Request | RowAnswer], answers: Sequence[RowAnswer], json_schema: str) -> pa.Array:
    """Values of completions that ended by the job's schema; null for all others."""
    return answer_type(json_schema).column(
        answer.completion
        if not isinstance(request, RowAnswer)
        and request.sampling.json_schema == json_schema
        and answer.finish_reason == "stop"
        else None
        for request, answer in zip(requests, answers, strict=True)
    )


def _metadata(record: JobRecord) -> dict[bytes, str]:
    """Metadata of the input's files that parts have too."""
    return {key.encode(): text for key, text in record.input.metadata.items()}


def _parquet(table: pa.Table, record: JobRecord) -> memoryview:
    sink = pa.BufferOutputStream()
    # Versions of PyArrow that lack the option never have such columns at this point, see `times_are_zoned`.
    zoned = {"write_time_adjusted_to_utc": True} if record.input.has_zoned_times else {}
    options = {"compression": "zstd", "write_page_checksum": True, **zoned}
    if record.input.has_arrow_schema:
        pq.write_table(table, sink, **options)
        return memoryview(sink.getvalue())
    # Metadata is added by itself: Arrow writes it only together with its own schema.
    metadata, table = table.schema.metadata, table.replace_schema_metadata()
    with pq.ParquetWriter(sink, table.schema, store_schema=False, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return memoryview(sink.getvalue())
