"""New, the same again, changed, or another job: what an output is opened as."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from lorabatch.jobs.errors import JobRequestError, OutputConflictError
from lorabatch.jobs.opening.opened_job import check_silent, open_job
from lorabatch.jobs.parts import PartMark
from lorabatch.jobs.record import JobState, changed_adapters
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore


@pytest.fixture
def given(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A request over a real tiny model and a real adapter."""
    pq.write_table(pa.table({"id": [1, 2], "adapter": ["rank1", None], "prompt": ["a", "b"]}), tmp_path / "in.parquet")
    shutil.copytree(tiny_adapters["rank1"], tmp_path / "adapters" / "rank1")
    return {
        "model": str(tiny_llama),
        "adapters": str(tmp_path / "adapters"),
        "input": str(tmp_path / "in.parquet"),
        "output": str(tmp_path / "out"),
    }


def test_a_new_job_is_frozen_with_everything_named_by_content(given: dict[str, Any]) -> None:
    job = open_job(JobSpec(**given, name="nightly", storage_options={"key": "hush-hush"}))
    assert (job.is_finished, job.changed_adapters) == (False, frozenset())
    assert job.store.read_record() == job.record
    assert job.record.job_id.startswith("nightly-")
    assert {a.name: (a.verdict, a.rank) for a in job.record.adapters} == {"rank1": ("exact", 1)}
    assert all(len(a.sha256) == 64 and a.weight_bytes > 0 for a in job.record.adapters)
    assert len(job.record.model.sha256) == 64
    assert job.record.storage_option_names == ("key",)
    frozen = Path(given["output"], "_lorabatch", "job.json").read_text()
    assert "hush" not in frozen
    assert json.loads(frozen)["versions"]["lorabatch"]


def test_the_same_job_again_resumes_it(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    first.store.commit_part(0, b"part")
    again = open_job(JobSpec(**given, workers=3, max_errors="50%"))
    assert not again.is_finished
    assert again.record.job_id == first.record.job_id
    assert again.record.created_at == first.record.created_at
    assert again.record.spec.max_errors == "50%"
    assert again.store.committed_parts() == {0: 4}
    first.store.mark_success()
    assert not open_job(JobSpec(**given)).is_finished, "no run has said so in summary.json"
    assert not first.store.is_finished()
    first.store.write_summary({})
    first.store.mark_success()
    write_part(given["output"], 0, PartMark())
    assert open_job(JobSpec(**given)).is_finished


@pytest.mark.parametrize("name", ["parts.json", "summary.json"])
def test_a_job_whose_account_is_damaged_is_compared_again(given: dict[str, Any], name: str) -> None:
    store = open_job(JobSpec(**given)).store
    store.write_parts({})
    store.write_summary({})
    store.mark_success()
    assert open_job(JobSpec(**given)).is_finished
    Path(given["output"], "_lorabatch", name).write_text("{")
    assert not open_job(JobSpec(**given)).is_finished
    assert not store.is_finished()


def write_part(output: str, number: int, mark: PartMark) -> None:
    """A part with this mark; those of earlier versions have an empty one."""
    part = pa.table({"id": [1]}).replace_schema_metadata(mark.metadata())
    pq.write_table(part, Path(output, f"part-{number:05d}.parquet"))


def test_a_job_that_has_lost_the_list_of_its_parts_is_compared_again(given: dict[str, Any]) -> None:
    store, output = open_job(JobSpec(**given)).store, given["output"]

    def is_finished() -> bool:
        store.write_summary({})
        store.mark_success()
        return open_job(JobSpec(**given)).is_finished

    assert not is_finished(), "no part is left"
    write_part(output, 0, PartMark())
    assert is_finished(), "an earlier version wrote no list"
    write_part(output, 1, PartMark(contents="c", shard_id="1"))
    assert not is_finished()
    Path(output, "part-00000.parquet").write_bytes(b"")
    assert not is_finished()


def test_a_damaged_state_says_nothing(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    Path(given["output"], "_lorabatch", "state.json").write_text("{")
    assert open_job(JobSpec(**given)).record.job_id == first.record.job_id


def test_an_input_that_was_replaced_and_put_back_is_read_again(given: dict[str, Any]) -> None:
    path = Path(given["input"])
    content, store = path.read_bytes(), open_job(JobSpec(**given)).store
    store.write_rows(0, b"rows of the file that was there")
    store.write_index(0, b"their numbers")
    assert open_job(JobSpec(**given)).store.has_index(0), "nothing has changed"
    path.write_bytes(content)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    again = open_job(JobSpec(**given))
    assert not store.has_index(0)
    assert again.record.input.files[0].version != store.read_record().input.files[0].version


def test_verify_reads_the_input_of_a_planned_job_again(given: dict[str, Any]) -> None:
    store = open_job(JobSpec(**given)).store
    store.write_plan(b"plan")
    for options, is_kept in (({}, True), ({"verify": True}, False)):
        store.write_rows(0, b"rows")
        store.write_index(0, b"numbers")
        store.write_parts({})
        store.write_summary({})
        store.mark_success()
        assert open_job(JobSpec(**given, **options)).is_finished == is_kept
        assert store.has_index(0) == is_kept


def test_another_job_on_the_same_output_is_refused_with_every_difference(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    pq.write_table(pa.table({"id": [1, 2], "adapter": ["rank1", None], "prompt": ["a", "c"]}), given["input"])
    with pytest.raises(OutputConflictError) as caught:
        open_job(JobSpec(**given, temperature=0.5))
    text = str(caught.value)
    assert first.record.job_id in text
    assert "temperature: was 0.0, now 0.5" in text
    assert "input: its files or columns have changed" in text
    assert "--overwrite" in text
    assert JobStore(given["output"]).read_record() == first.record


def test_a_job_that_ended_before_it_had_a_plan_makes_way_for_one_with_corrected_rows(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    first.store.write_state(JobState("failed", 0.0))
    assert open_job(JobSpec(**given)).record.job_id == first.record.job_id
    pq.write_table(pa.table({"id": [1, 2], "adapter": ["rank1", None], "prompt": ["a", "c"]}), given["input"])
    fresh = open_job(JobSpec(**given))
    assert fresh.store.read_record() == fresh.record
    assert fresh.record.job_id != first.record.job_id
    assert fresh.store.read_state() is None


class GatedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Local files that can be read once the gate is open: `gated:///PATH`."""

    protocol = "gated"
    root_marker = "/"
    gate, is_asked = threading.Event(), threading.Event()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return LocalFileSystem().ls(self._strip_protocol(path), detail, **options)

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        self.is_asked.set()
        self.gate.wait(300)
        return open(path, "rb")


@pytest.mark.parametrize("left", ["records without a job", "a refused job"])
def test_of_two_jobs_that_both_could_start_over_the_faster_one_stays(given: dict[str, Any], left: str) -> None:
    if left == "a refused job":
        open_job(JobSpec(**given, seed=1)).store.write_state(JobState("failed", 0.0))
    else:
        Path(given["output"], "_lorabatch", "logs").mkdir(parents=True)
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    GatedFileSystem.gate.clear()
    GatedFileSystem.is_asked.clear()
    slow = JobSpec(**(given | {"adapters": f"gated://{given['adapters']}"}), seed=2)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(open_job, slow)
        # It has found the output free, and fetches its adapters.
        assert GatedFileSystem.is_asked.wait(300)
        fast = open_job(JobSpec(**given, seed=3))
        GatedFileSystem.gate.set()
        with pytest.raises(OutputConflictError, match="holds another job"):
            late.result(300)
    assert fast.store.read_record() == fast.record


@pytest.mark.parametrize("is_running", [True, False])
def test_a_job_that_runs_or_has_a_plan_does_not_make_way(given: dict[str, Any], is_running: bool) -> None:
    first = open_job(JobSpec(**given))
    first.store.write_state(JobState("indexing" if is_running else "failed", 0.0))
    if not is_running:
        first.store.write_plan(b"plan")
    with pytest.raises(OutputConflictError, match="seed: was 0, now 5"):
        open_job(JobSpec(**given, seed=5))


def test_overwriting_starts_over(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    first.store.commit_part(0, b"part")
    first.store.mark_success()
    fresh = open_job(JobSpec(**given, overwrite=True, seed=9))
    assert fresh.record.job_id != first.record.job_id
    assert fresh.store.committed_parts() == {}
    assert not fresh.store.is_finished()


def test_a_job_that_runs_is_not_overwritten(given: dict[str, Any]) -> None:
    # Its workers would go on answering by the old settings, into the parts of the new job.
    first = open_job(JobSpec(**given))
    first.store.commit_part(0, b"part")
    first.store.write_state(JobState("running", time.time(), rows=7))
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(0.2):
            first.store.write_state(JobState("running", time.time(), rows=7, rows_done=3))

    runner = threading.Thread(target=run)
    runner.start()
    try:
        with pytest.raises(OutputConflictError, match=r"running, 3 of 7 rows.*lorabatch cancel"):
            open_job(JobSpec(**given, overwrite=True, seed=9))
    finally:
        stopped.set()
        runner.join()
    assert first.store.committed_parts() == {0: 4}
    first.store.write_state(JobState("cancelled", time.time()))
    assert open_job(JobSpec(**given, overwrite=True, seed=9)).record.job_id != first.record.job_id
    with pytest.raises(OutputConflictError, match=f"job {first.record.job_id} was started over there"):
        first.store.check_holder(first.record.job_id)


def test_a_job_whose_runner_was_killed_long_ago_is_overwritten(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    first.store.write_state(JobState("running", time.time() - 3600.0))
    assert open_job(JobSpec(**given, overwrite=True)).record.job_id != first.record.job_id


@pytest.mark.parametrize(("silent_s", "is_watched"), [(0.0, True), (3600.0, False)])
def test_a_state_that_is_not_final_is_watched_until_it_has_been_silent(
    given: dict[str, Any], silent_s: float, is_watched: bool
) -> None:
    reads: list[JobState | None] = []

    class CountingStore(JobStore):
        def read_state(self) -> JobState | None:
            reads.append(super().read_state())
            return reads[-1]

    store = CountingStore(given["output"])
    store.write_state(JobState("running", time.time() - silent_s))
    check_silent(store, silence_s=1.5)
    assert (len(reads) > 1) == is_watched


def test_a_wrong_request_overwrites_nothing(given: dict[str, Any]) -> None:
    first = open_job(JobSpec(**given))
    first.store.commit_part(0, b"part")
    with pytest.raises(JobRequestError, match="not found"):
        open_job(JobSpec(**given | {"input": "/no/such.parquet"}, overwrite=True))
    assert first.store.committed_parts() == {0: 4}


def test_records_of_a_job_that_was_never_frozen_are_not_taken_over(given: dict[str, Any]) -> None:
    store = JobStore(given["output"])
    store.write_plan(b"stale")
    job = open_job(JobSpec(**given))
    assert not job.store.has_plan()


def test_adapters_that_change_appear_or_vanish_are_named(given: dict[str, Any], tiny_adapters: dict[str, Path]) -> None:
    folder = Path(given["adapters"])
    shutil.copytree(tiny_adapters["rank8"], folder / "rank8")
    first = open_job(JobSpec(**given))
    shutil.rmtree(folder / "rank1")
    shutil.copytree(tiny_adapters["rank64"], folder / "rank64")
    config = folder / "rank8" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 99}))
    again = open_job(JobSpec(**given))
    assert again.changed_adapters == {"rank1", "rank8", "rank64"}
    assert changed_adapters(first.record, first.record) == frozenset()


def test_adapters_that_cannot_be_used_are_refused_in_the_record_and_do_not_stop_the_job(given: dict[str, Any]) -> None:
    adapters = {
        "good": f"{given['adapters']}/rank1",
        "gone": "/no/such/adapter",
        "empty": str(Path(given["output"]).parent),
    }
    job = open_job(JobSpec(**given | {"adapters": adapters}))
    verdicts = {adapter.name: adapter for adapter in job.record.adapters}
    assert verdicts["good"].verdict == "exact"
    assert verdicts["gone"].is_refused
    assert "'/no/such/adapter'" in verdicts["gone"].reasons[0]
    assert verdicts["empty"].is_refused
    assert verdicts["empty"].reasons


def test_two_clients_at_the_same_moment_open_one_job(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the output empty when it checks, and taken when it freezes."""
    freeze = JobStore.freeze
    others: list[Any] = []

    def late(store: JobStore, record: Any) -> bool:
        monkeypatch.setattr(JobStore, "freeze", freeze)
        others.append(open_job(JobSpec(**given)))
        return freeze(store, record)

    monkeypatch.setattr(JobStore, "freeze", late)
    job = open_job(JobSpec(**given))
    assert job.record.job_id == others[0].record.job_id


def test_a_job_may_have_its_model_hashed_again(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = open_job(JobSpec(**given)).record.model.sha256
    for remembered in (tmp_path / "cache" / "lorabatch" / "digests").iterdir():
        remembered.write_text("0" * 64)
    with pytest.raises(OutputConflictError, match="the content of"):
        open_job(JobSpec(**given))
    assert open_job(JobSpec(**given, verify=True)).record.model.sha256 == before
