"""The output of a job in one order and as one hash, whatever its parts were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# How often a row was started says what happened, not what was answered.
_NOT_AN_ANSWER = ("attempts",)


def sorted_output(output: Path) -> pa.Table:
    """All rows, sorted by id and, where a row has several completions, their numbers."""
    parts = [pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))]
    rows = pa.concat_tables(parts).combine_chunks()
    return rows.sort_by([(name, "ascending") for name in ("id", "sample") if name in rows.column_names])


def without_attempts(value: Any) -> Any:
    """The value of a row or a column without how often anything in it was started."""
    if isinstance(value, dict):
        return {name: without_attempts(item) for name, item in value.items() if name not in _NOT_AN_ANSWER}
    return [without_attempts(item) for item in value] if isinstance(value, list) else value


def digest(output: Path) -> str:
    """SHA-256 over the sorted rows' bytes as an Arrow stream, all columns but `attempts`."""
    # each job's parts bear its own name
    whole = sorted_output(output)
    if any(pa.types.is_nested(field.type) for field in whole.schema):
        rows = json.dumps(list(map(without_attempts, whole.to_pylist())), default=str)
        return hashlib.sha256(f"{whole.schema.remove_metadata()}{rows}".encode()).hexdigest()
    table = whole.drop_columns(list(_NOT_AN_ANSWER)).combine_chunks().replace_schema_metadata()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()
