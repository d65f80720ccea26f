"""`EarlyCheck`: checks a job's rows in this process while its cluster starts.

Bad rows are thus found before an engine is started. A small job is indexed, and its coordinator finds the index in the
output. In a larger job only the ids are read and compared.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from ...jobs.errors import ErrorBudgetError, InputRowsError
from ...jobs.input.columns import readable
from ...jobs.opening.opened_job import OpenedJob
from ..dataset.chunk import ChunkRef, IndexJob, RowGroupRef, read_column
from ..dataset.index import IndexTotals, index_chunk, list_chunks
from .plan import check_rows
from .validation import IDS_SHOWN, double_ids, id_example

logger = logging.getLogger(__name__)
# Most rows of a job that is indexed, which takes well under a second. Larger jobs are indexed by workers while their
# engines start.
MAX_INDEXED_ROWS = 4096
_MAX_INDEXED_CHUNKS = 16
# Most rows and chunks of a job whose ids are compared, which is done in memory.
_MAX_IDS = 2_000_000
_MAX_CHUNKS = 1024
_PATIENCE_S = 2.0


class EarlyCheck:
    """The check of one job, in a thread of its own. A context manager; leaving it ends the thread.

    Nothing is checked when an earlier run has planned the rows.
    """

    def __init__(self, job: OpenedJob, patience_s: float = _PATIENCE_S) -> None:
        self._job = job
        self._patience_s = patience_s
        self._is_left = threading.Event()
        self._outcome: Future[None] = Future()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not self._job.store.has_plan():
            self._thread = threading.Thread(target=self._run, name="early check", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left.set()
        if self._thread is not None:
            self._thread.join()

    def raise_problems(self) -> None:
        """Raise `InputRowsError` or `ErrorBudgetError` if the check has found that the rows cannot be run.

        Waits for the check for at most `patience_s`. When it is not over by then, or storage fails, the job's
        coordinator finds such rows later.
        """
        if self._thread is None:
            return
        try:
            self._outcome.result(self._patience_s)
        except (InputRowsError, ErrorBudgetError):
            raise
        except Exception as error:
            self._is_left.set()
            logger.info("rows are not checked before engines start: %s", str(error) or type(error).__name__)

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    def _check(self) -> None:
        num_rows, chunks = self._job.record.num_asked, list_chunks(self._job.record, self._job.spec.places)
        if num_rows <= MAX_INDEXED_ROWS and len(chunks) <= _MAX_INDEXED_CHUNKS:
            self._check_index(chunks)
        elif num_rows <= _MAX_IDS and len(chunks) <= _MAX_CHUNKS:
            self._check_ids(chunks)

    def _check_index(self, chunks: Sequence[ChunkRef]) -> None:
        job = self._job
        index_job = IndexJob.from_record(job.record, job.spec)
        totals = IndexTotals()
        for chunk in chunks:
            if self._is_left.is_set():
                return
            totals.add(index_chunk(chunk, index_job, job.store))
        sources = [job.store.source(name) for name in job.record.sources]
        with check_rows(job.store, job.record, totals, sources):
            pass

    def _check_ids(self, chunks: Sequence[ChunkRef]) -> None:
        column = self._job.record.input.roles.get("id")
        if column is None:
            return
        ids = []
        groups = [group for chunk in chunks for group in chunk.row_groups]
        for group in groups:
            if self._is_left.is_set():
                return
            ids.append(read_column(group, column, self._job.spec.storage_options))
        found = pa.chunked_array(ids)
        counts = found.drop_null().value_counts()
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
        if len(repeated):
            examples = [
                id_example(readable(value), _places(groups, pc.indices_nonzero(pc.equal(found, value))))
                for value in repeated[:IDS_SHOWN]
            ]
            raise double_ids(column, len(repeated), examples)


def _places(groups: Sequence[RowGroupRef], rows: pa.Array) -> list[str]:
    """`file:row` of rows, which are numbered in the whole input."""
    starts = list(accumulate((group.num_rows for group in groups), initial=0))
    found = []
    for row in rows.to_pylist():
        number = bisect_right(starts, row) - 1
        found.append(f"{groups[number].file_name}:{groups[number].first_row + row - starts[number]}")
    return found
