"""Reads the rows of a job's parts in the order in which the parts appear, while the job runs and afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import JobFailedError, JobRequestError, MissingFileError
from ..record import BEGINNING_PHASES
from ..store import JobStore
from .job_status import JobStatus, read_status, wait_interval_s

# Rows that are read from a part at once.
_BATCH_ROWS = 1024


def follow_rows(store: JobStore, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Each row of the job once, part by part as parts are written; ends when the job is done.

    `columns`: names of the columns to read; None for all. A run that begins anew may take parts away, so nothing is
    read before it has planned its rows.

    Raises `JobRequestError` for unknown columns, an output without a job, and one that another job has taken over; the
    error that ended the job, after its last row; `JobFailedError` when a part that was read was computed again.
    """
    began_s, job_id = time.monotonic(), read_status(store.latest()).record.job_id
    # Shard id -> bytes of its part when it was read.
    read: dict[int, int] = {}
    while True:
        # The status is read before the listing: the parts of a job that is done are all in it.
        place = store.latest()
        status = read_status(place)
        if status.record.job_id != job_id:
            raise JobRequestError(f"output={status.output!r}: another job has taken the place of {job_id}.")
        place = place.settled()
        parts = _files(place, status)
        _check_unchanged(status, read, parts)
        new = sorted(parts.keys() - read.keys())
        for shard_id in new:
            try:
                yield from _rows_of_file(place, shard_id, columns)
            except MissingFileError:
                continue  # taken away since the listing, and written again later
            read[shard_id] = parts[shard_id]
        # Parts are compared once more behind the last one.
        if status.has_ended and not new:
            break
        time.sleep(0.0 if new else wait_interval_s(store, time.monotonic() - began_s))
    if (error := status.error) is not None:
        raise error


def _files(place: JobStore, status: JobStatus) -> dict[int, int]:
    """Number -> bytes of the files that have the rows of the job by now: those of a wide output have none before its
    end.
    """
    is_there = status.is_finished if status.record.is_wide else _has_planned(status)
    return place.contents().files if is_there else {}


def _has_planned(status: JobStatus) -> bool:
    """Whether the parts that are there stay: no run is about to begin."""
    return status.is_resting or status.state is None or status.state.phase not in BEGINNING_PHASES


def _check_unchanged(status: JobStatus, read: dict[int, int], parts: dict[int, int]) -> None:
    changed = [shard_id for shard_id, size in read.items() if parts and parts.get(shard_id) != size]
    if changed:
        raise JobFailedError(
            f"output={status.output!r}: {len(changed)} parts that were read are computed again, by another run. Read "
            "the rows again from the first."
        )


def _rows_of_file(store: JobStore, number: int, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with store.open_file(number) as source, pq.ParquetFile(source) as part:
        names = part.schema_arrow.names
        unknown = [name for name in columns or () if name not in names]
        if unknown:
            raise JobRequestError(f"columns={unknown!r}: not in the output. It has {', '.join(names)}.")
        for batch in part.iter_batches(_BATCH_ROWS, columns=None if columns is None else list(columns)):
            yield from batch.to_pylist()
