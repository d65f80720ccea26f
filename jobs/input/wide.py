"""Makes a wide table of a sweep's answers: a row for each row of the input, and a struct column for each adapter.

The columns of adapters have their names behind the job's `output_prefix`. The fields of a struct are the columns of an
answer, without the prefix, since nothing of the input is beside them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import JobRequestError
from ..record import JobRecord
from .columns import (
    DEFAULT_ID_COLUMN,
    answer_fields,
    copied_schema,
    expected_field,
    output_name,
    readable_values,
    records_samples,
    sample_field,
)

#: Name of the struct column of the base model.
BASE_COLUMN = "base_model"


def wide_table(answers: pa.Table, record: JobRecord, rows: Sequence[int] | None = None) -> pa.Table:
    """The answers of a sweep (`answers`: a row for each row of the input and each adapter) as a wide table. Rows are in
    the order in which they first are in `answers`; a struct is null where an adapter has no such row, such as a
    completion that it was not asked for.

    `rows`: number of the input's row of each answer, `[num_answers]`; without, answers with one id are one row's.

    Raises `JobRequestError` for a job that is no sweep, and for an adapter with the name of another column.
    """
    if not record.swept:
        raise JobRequestError("wide: this job is no sweep. Leave wide out, or run the job with for_each_adapter.")
    if problems := wide_clashes(record):
        raise JobRequestError(*problems)
    ours = [field.name for field in answer_fields(record)]
    named = record.input.roles["adapter"]
    names = answers[named].to_pylist()
    row, first = _rows(answers, record, names, rows)
    table = answers.drop_columns([named, *ours]).take(pa.array(first)).replace_schema_metadata()
    values = answers.select(ours).combine_chunks()
    values = values.rename_columns([name.removeprefix(record.spec.output_prefix) for name in ours])
    places = {name: np.flatnonzero([one == name for one in names]) for name in record.swept}
    for name, column in wide_columns(record).items():
        mine = places[name]
        place = np.zeros(len(first), np.int64)
        is_missing = np.ones(len(first), bool)
        place[row[mine]], is_missing[row[mine]] = mine, False
        found = values.take(pa.array(place, mask=is_missing)).combine_chunks()
        arrays = [array.combine_chunks() for array in found.columns]
        structs = pa.StructArray.from_arrays(arrays, fields=list(found.schema), mask=pa.array(is_missing))
        table = table.append_column(column, structs)
    return table


def wide_columns(record: JobRecord) -> dict[str | None, str]:
    """The struct column of each adapter of a sweep (None: the base model), in their order."""
    return {name: output_name(record, BASE_COLUMN if name is None else name) for name in record.swept}


def wide_clashes(record: JobRecord) -> list[str]:
    """Why two columns of a sweep's wide output would have one name, as sentences."""
    others = [name for name in copied_schema(record).names if name != record.input.roles.get("adapter")]
    others += [DEFAULT_ID_COLUMN] if "id" not in record.input.roles else []
    others += [sample_field(record).name] if records_samples(record) else []
    others += [expected.name] if (expected := expected_field(record)) is not None else []
    columns = Counter([*wide_columns(record).values(), *others])
    return [
        f"shape='wide', adapter {name or BASE_COLUMN!r}: {column!r} is its column and another one. Rename the adapter, "
        "as in --adapters NAME=URL, or put a text before the columns of all adapters with --output-prefix."
        for name, column in wide_columns(record).items()
        if columns[column] > 1
    ]


def _rows(
    answers: pa.Table, record: JobRecord, names: Sequence[str | None], rows: Sequence[int] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of each answer's row in the wide table, `[num_answers]`, and the first answer of each row, `[num_rows]`.

    Rows without an id are told apart by their order, which is that of every adapter.
    """
    ids = answers[record.input.roles.get("id", DEFAULT_ID_COLUMN)]
    keys: list[Sequence[object]] = [readable_values(ids) if rows is None else rows]
    keys += [answers[sample_field(record).name].to_pylist()] if records_samples(record) else []
    seen: Counter[tuple[object, ...]] = Counter()
    of_key: dict[tuple[object, ...], int] = {}
    found = np.empty(len(names), np.int64)
    for place, (name, *key) in enumerate(zip(names, *keys, strict=True)):
        again = seen[name, *key]
        seen[name, *key] += 1
        found[place] = of_key.setdefault((*key, again), len(of_key))
    _, first = np.unique(found, return_index=True)
    return found, first
