"""What a process logs while it runs jobs, one or several at once."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.job_log import job_log


def test_lines_of_a_job_go_to_its_log_and_loggers_are_as_before_afterwards(tmp_path: Path) -> None:
    logger = logging.getLogger("lorabatch")
    before = (logger.handlers[:], logger.propagate, logger.level)
    with job_log(JobStore(str(tmp_path))):
        logger.info("hello")
        logging.getLogger("distributed").error("from below")
    assert (logger.handlers[:], logger.propagate, logger.level) == before
    text = JobStore(str(tmp_path)).read_logs()["client"]
    assert "hello" in text
    assert "from below" in text


def test_jobs_of_one_process_may_overlap_in_any_order(tmp_path: Path) -> None:
    logger = logging.getLogger("lorabatch")
    before = (logger.handlers[:], logger.propagate, logger.level)
    stores = [JobStore(str(tmp_path / name)) for name in ("first", "second", "third")]
    logs = [ExitStack() for _ in stores]
    for store, log in zip(stores, logs, strict=True):
        log.enter_context(job_log(store))
    for number in (0, 2, 1):
        logger.info("before %d ends", number)
        logs[number].close()
    assert (logger.handlers[:], logger.propagate, logger.level) == before
    found = [store.read_logs()["client"] for store in stores]
    assert [text.count("ends") for text in found] == [1, 3, 2]
