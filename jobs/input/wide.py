"""Makes a wide table of a sweep's answers: a row for each row of the input, and a struct column for each adapter."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ..errors import JobRequestError
from ..record import JobRecord
from .columns import DEFAULT_ID_COLUMN, answer_fields, readable_values, records_samples, sample_field

#: Name of the struct column of the base model.
BASE_COLUMN = "base_model"


def wide_table(answers: pa.Table, record: JobRecord) -> pa.Table:
    """The answers of a sweep (`answers`: a row for each row of the input and each adapter) as a wide table. Rows are in
    the order in which they first are in `answers`; a struct is null where an adapter has no such row, such as a
    completion that it was not asked for.

    Raises `JobRequestError` for a job that is no sweep, and for an adapter with the name of another column.
    """
    if not record.swept:
        raise JobRequestError("wide: this job is no sweep. Leave wide out, or run the job with for_each_adapter.")
    ours = [field.name for field in answer_fields(record)]
    named = record.input.roles["adapter"]
    given = answers.drop_columns([named, *ours])
    columns = {name: BASE_COLUMN if name is None else name for name in record.swept}
    taken = [column for column in columns.values() if column in given.column_names]
    if taken or len({*columns.values()}) < len(columns):
        shown = taken or [BASE_COLUMN]
        raise JobRequestError(f"wide: {shown[0]!r} is an adapter and another column. Rename the adapter, as NAME=URL.")
    keys = [readable_values(answers[record.input.roles.get("id", DEFAULT_ID_COLUMN)])]
    keys += [answers[sample_field(record).name].to_pylist()] if records_samples(record) else []
    of_key: dict[tuple[object, ...], int] = {}
    row = np.array([of_key.setdefault(key, len(of_key)) for key in zip(*keys, strict=True)], np.int64)
    _, first = np.unique(row, return_index=True)
    table = given.take(pa.array(first))
    values = answers.select(ours).combine_chunks()
    names = np.array([name or "" for name in answers[named].to_pylist()], object)
    for name, column in columns.items():
        mine = np.flatnonzero(names == (name or ""))
        place = np.zeros(len(of_key), np.int64)
        is_missing = np.ones(len(of_key), bool)
        place[row[mine]], is_missing[row[mine]] = mine, False
        found = values.take(pa.array(place, mask=is_missing)).combine_chunks()
        arrays = [array.combine_chunks() for array in found.columns]
        structs = pa.StructArray.from_arrays(arrays, fields=list(found.schema), mask=pa.array(is_missing))
        table = table.append_column(column, structs)
    return table
