"""The output of a job in one order and as one hash, whatever its parts were."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# How often a row was started says what happened, not what was answered.
_NOT_AN_ANSWER = ("attempts",)


def sorted_output(output: Path) -> pa.Table:
    """All rows, sorted by id and, where a row has several completions, their numbers."""
    parts = [pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))]
    rows = pa.concat_tables(parts).combine_chunks()
    return rows.sort_by([(name, "ascending") for name in ("id", "sample") if name in rows.column_names])


def digest(output: Path) -> str:
    """SHA-256 over the sorted rows' bytes as an Arrow stream, all columns but `attempts`."""
    # each job's parts bear its own name
    table = sorted_output(output).drop_columns(list(_NOT_AN_ANSWER)).combine_chunks().replace_schema_metadata()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()
