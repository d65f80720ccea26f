"""`EarlyCheck`: indexes and checks a small job's rows in this process while its cluster starts.

What is wrong with the rows is then known before an engine is started. The index is not made twice: the coordinator of
the job finds it in the output.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from ...jobs.errors import ErrorBudgetError, InputRowsError
from ...jobs.opening import OpenedJob
from ..dataset.chunk import IndexJob
from ..dataset.index import IndexTotals, index_chunk, list_chunks
from .plan import check_rows

logger = logging.getLogger(__name__)
# Indexed in well under a second. For larger jobs the workers' index counts, beside the start of their engines.
MAX_ROWS = 4096
_MAX_CHUNKS = 16
_PATIENCE_S = 2.0


class EarlyCheck:
    """The check of one job, in a thread of its own. A context manager; leaving it ends the thread.

    Nothing is checked where there are too many rows, or when a run before has planned them.
    """

    def __init__(self, job: OpenedJob, patience_s: float = _PATIENCE_S) -> None:
        self._job = job
        self._patience_s = patience_s
        self._is_left = threading.Event()
        self._outcome: Future[None] = Future()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        record = self._job.record
        is_small = record.input.num_rows <= MAX_ROWS and len(list_chunks(record)) <= _MAX_CHUNKS
        if is_small and not self._job.store.has_plan():
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
        """Raise `InputRowsError` or `ErrorBudgetError` when the rows cannot be run, as far as that is known.

        Waits for the check for a moment. What it cannot say, for want of time or because storage fails, the job's
        coordinator will.
        """
        if self._thread is None:
            return
        try:
            self._outcome.result(self._patience_s)
        except (InputRowsError, ErrorBudgetError):
            raise
        except Exception as error:
            self._is_left.set()
            logger.info("rows are not checked before engines start: %s", error or type(error).__name__)

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    def _check(self) -> None:
        job = self._job
        index_job = IndexJob.from_record(job.record, job.spec)
        totals = IndexTotals()
        for chunk in list_chunks(job.record, job.spec.inputs):
            if self._is_left.is_set():
                return
            totals.add(index_chunk(chunk, index_job, job.store))
        with check_rows(job.store, job.record, totals):
            pass
