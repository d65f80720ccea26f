"""Log lines reach the job's logs, whole, and also the last ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabatch.jobs.store import JobStore
from lorabatch.pipeline import log_shipper
from lorabatch.pipeline.log_shipper import LogShipper


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(str(tmp_path / "output"))


def test_everything_is_there_after_closing_even_a_line_without_an_end(store: JobStore, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    shipper = LogShipper(store, {"engine": log, "never": tmp_path / "never.log"})
    log.write_text("one\ntwo\nthr")
    shipper.close()
    assert store.read_logs() == {"engine": "one\ntwo\nthr"}


def test_what_was_shipped_is_not_shipped_again(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipper, "LOCAL_INTERVAL_S", 0.01)
    log = tmp_path / "engine.log"
    shipper = LogShipper(store, {"engine": log})
    for number in range(50):
        with log.open("a") as file:
            file.write(f"line {number}\n")
    shipper.close()
    assert store.read_logs()["engine"].splitlines() == [f"line {number}" for number in range(50)]


def test_more_than_one_shipment_is_cut_into_several(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipper, "MAX_SHIPMENT_BYTES", 100)
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {number}\n" for number in range(200)))
    LogShipper(store, {"engine": log}).close()
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
