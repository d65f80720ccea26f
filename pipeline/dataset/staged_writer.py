"""Writes the rows of a shard with stages as the bytes of its part file: a struct column for each stage of the output.

The metadata of the file has counts of all requests, also of stages that the output leaves out.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa

from ...engine.errors import RUN_AGAIN
from ...engine.request import Request
from ...jobs.input.stage_columns import PICK_FIELDS, PROBABILITY, output_fields, output_stages, stage_struct
from ...jobs.options.stages import Stage, stages_of
from ...jobs.record import JobRecord
from ...jobs.stages import stage_record
from .answers import RowAnswer, probabilities
from .reader import ShardRows, given_values, stage_adapter
from .row_program import RowProgram
from .schema import passthrough_schema
from .writer import ContentOf, Spell, answer_columns, finished_part, part_schema, with_contents

# Values of a request that a part counts, and the place of its row; parts of earlier versions lack the place.
_COUNTED = ("stage", "adapter", "prompt_tokens", "completion_tokens", "finish_reason", "mode", "error", "row")


def staged_part_bytes(
    rows: ShardRows,
    programs: Sequence[RowProgram],
    record: JobRecord,
    run_id: str,
    num_reused: int,
    spell: Spell,
    content_of: ContentOf,
) -> memoryview:
    """The Parquet file of one shard. `programs`: of its rows, all done. `num_reused`: rows whose answers runs before
    `run_id` computed.
    """
    undone = [row for row, program in enumerate(programs) if not program.is_done]
    assert not undone, f"shard {rows.shard_id}: {len(undone)} rows are not done, first row {undone[0]}"
    schema = part_schema(rows.table.schema, output_fields(record))
    errors = [_first_error(program) for program in programs]
    attempts = [max((answer.attempts for answer, _ in _answers(program)), default=0) for program in programs]
    given = given_values(rows.table)
    columns = [_stage_column(stage, programs, given, record, spell, content_of) for stage in output_stages(record.spec)]
    columns += [pa.array(errors, pa.string()), pa.array(attempts, pa.int32())]
    kept = rows.table.select(passthrough_schema(rows.table.schema).names)
    table = pa.Table.from_arrays([*kept.columns, *columns], schema=schema)
    return finished_part(
        table,
        rows,
        record,
        run_id,
        requests=_packed(programs, given, record),
        num_completions=rows.num_rows,
        num_reused=num_reused,
        num_errors=sum(error is not None for error in errors),
        num_curable=sum(RUN_AGAIN in (error or "") for error in errors),
    )


def counted_requests(packed: str) -> list[dict[str, Any]]:
    """The requests of a part, each with the values that are counted; `packed`: of its mark."""
    if not packed:
        return []
    rows = msgpack.unpackb(zlib.decompress(base64.b64decode(packed)))
    return [dict(zip(_COUNTED, row, strict=False)) for row in rows]


def lengths_of_rows(packed: str) -> list[tuple[str | None, int]]:
    """Name of the adapter of each row's first stage, and tokens of all its answers; `packed`: of a part's mark."""
    found: dict[int, tuple[str | None, int]] = {}
    for asked in counted_requests(packed):
        if "row" in asked:
            adapter, tokens = found.get(asked["row"], (asked["adapter"], 0))
            found[asked["row"]] = adapter, tokens + asked["completion_tokens"]
    return list(found.values())


def _packed(programs: Sequence[RowProgram], given: Sequence[Mapping[str, Any]], record: JobRecord) -> str:
    rows = []
    for place, (program, values) in enumerate(zip(programs, given, strict=True)):
        adapters = {stage.name: stage_adapter(stage, values, record) for stage in program.flow.stages if stage.asks}
        for name, answer in program.answers():
            counted = [getattr(answer, field) for field in _COUNTED[2:-1]]
            rows.append([name, adapters[name], *counted, place])
    return base64.b64encode(zlib.compress(msgpack.packb(rows))).decode()


def _answers(program: RowProgram) -> Iterator[tuple[RowAnswer, Request | None]]:
    """Answers among the results of a row, in order of the stages."""
    for result in program.results.values():
        if isinstance(result, list):
            yield from (one for one in result if one is not None)
        elif isinstance(result, tuple):
            yield result


def _first_error(program: RowProgram) -> str | None:
    return next((answer.error for answer, _ in _answers(program) if answer.error is not None), None)


def _stage_column(
    stage: Stage,
    programs: Sequence[RowProgram],
    given: Sequence[Mapping[str, Any]],
    record: JobRecord,
    spell: Spell,
    content_of: ContentOf,
) -> pa.Array:
    """The column of one stage, `[num_rows]`."""
    results = [program.results[stage.name] for program in programs]
    items = [result if isinstance(result, list) else [result] for result in results]
    found = [(one, row) for row, of_row in enumerate(items) for one in of_row if one is not None]
    structs = _structs(stage, [one for one, _ in found], [given[row] for _, row in found], record, spell, content_of)
    places = iter(range(len(found)))
    numbers = [None if one is None else next(places) for of_row in items for one in of_row]
    if not stage.is_list:
        return structs.take(pa.array(numbers, pa.int32()))
    lengths = [0 if result is None else len(of_row) for result, of_row in zip(results, items, strict=True)]
    numbers = [
        number
        for result, of_row, start in zip(results, items, np.cumsum([0, *map(len, items)]).tolist(), strict=False)
        for number in (numbers[start : start + len(of_row)] if result is not None else [])
    ]
    offsets = np.cumsum([0, *lengths])
    is_null = np.array([*(result is None for result in results), False])
    of_lists = pa.array(offsets, pa.int32(), mask=is_null)
    return pa.ListArray.from_arrays(of_lists, structs.take(pa.array(numbers, pa.int32())))


def _structs(
    stage: Stage,
    results: Sequence[Any],
    given: Sequence[Mapping[str, Any]],
    record: JobRecord,
    spell: Spell,
    content_of: ContentOf,
) -> pa.StructArray:
    """Results as structs, `[num_results]`."""
    kind = stage_struct(record, stage)
    asked, pairs, picks = stage, results, []
    if stage.pick is not None:
        picks = list(results)
        pairs = [(pick.answer, pick.request) for pick in picks]
        asked = next(one for one in stages_of(record.spec.stages) if one.name == stage.pick)
    answers = with_contents([answer for answer, _ in pairs], content_of)
    requests = [request or answer for answer, request in pairs]
    names = [stage_adapter(asked, values, record) for values in given]
    columns = answer_columns(requests, answers, names, stage_record(record, asked), spell)
    if kind.get_field_index(PROBABILITY) >= 0:
        columns[PROBABILITY] = pa.array(map(_shares, requests, answers), kind.field(PROBABILITY).type)
    for field in PICK_FIELDS if picks else ():
        columns[field.name] = pa.array([getattr(pick, field.name) for pick in picks], field.type)
    if not answers:
        return pa.array([], kind)
    return pa.StructArray.from_arrays([columns[field.name] for field in kind], fields=list(kind))


def _shares(request: Request | RowAnswer, answer: RowAnswer) -> dict[str, float] | None:
    shares = probabilities(answer.choice_logprobs)
    if isinstance(request, RowAnswer) or shares is None:
        return None
    return dict(zip(request.sampling.choice, shares, strict=True))
