"""Log lines reach the job's logs, whole, and also the last ones.

What a process logs while it runs jobs, one or several at once.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import pytest

from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.monitoring.logs import LogShipper, job_log
from lorabatch.system.untrusted import printable


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(str(tmp_path / "output"))


def test_everything_is_there_after_closing_even_a_line_without_an_end(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    shipper = LogShipper(store, {"engine": log, "never": tmp_path / "never.log"})
    log.write_text("one\ntwo\nthr")
    shipper.close()
    assert store.read_logs() == {"engine": "one\ntwo\nthr"}


def test_what_was_shipped_is_not_shipped_again(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    shipper = LogShipper(store, {"engine": log}, interval_s=0.01)
    for number in range(50):
        with log.open("a") as file:
            file.write(f"line {number}\n")
    shipper.close()
    assert store.read_logs()["engine"].splitlines() == [f"line {number}" for number in range(50)]


def test_more_than_one_shipment_is_cut_into_several(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {number}\n" for number in range(200)))
    LogShipper(store, {"engine": log}, max_shipment_bytes=100).close()
    assert store.read_logs()["engine"] == log.read_text()


def test_of_a_log_that_others_have_written_to_only_the_rest_is_shipped(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("of another job\n")
    shipper = LogShipper(store, {"engine": log, "later": tmp_path / "later.log"}, shared=("engine", "later"))
    for name in ("engine", "later"):
        with (tmp_path / f"{name}.log").open("a") as file:
            file.write("of ours\n")
    shipper.close()
    assert store.read_logs() == {"engine": "of ours\n", "later": "of ours\n"}


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


FORGED = "2026-11-23 04:00:00,000 WARNING lorabatch.x: all is lost"


def test_nothing_in_a_message_looks_like_a_record_of_its_own_or_moves_the_cursor(store: JobStore) -> None:
    logger = logging.getLogger("lorabatch.x")
    with job_log(store):
        for end in ("\n", "\r\n", "\r", "\x0b", "\x1c", "\x85", "\u2028"):
            logger.warning("adapter %s", f"cat{end}{FORGED}")
        try:
            raise ValueError(f"\x1b[2J\u202edog\n{FORGED}")
        except ValueError:
            logger.exception("adapter %s", "\x1b]0;title\x07")
    text = store.read_logs()["client"]
    lines = text.splitlines()
    assert sum(FORGED in line for line in lines) == 8
    assert not any(line.startswith(FORGED) for line in lines)
    assert [line for line in text.split("\n") if "cat" in line][-1].endswith(rf"cat\u2028{FORGED}")
    assert r"\x1b]0;title\x07" in text
    assert r"ValueError: \x1b[2J\u202edog" in text
    assert printable(text) == text


def test_whatever_a_process_prints_is_shipped_as_text(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"loading 1/2\rloading 2/2\r\npanicked at \x1b[31m\xffid\n")
    LogShipper(store, {"engine": log}).close()
    assert store.read_logs()["engine"] == "loading 1/2\nloading 2/2\npanicked at \\x1b[31m\ufffdid\n"
