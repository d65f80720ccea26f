"""Adapters in a store: opened by their headers, read by workers, and known by their content all the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from echo_job import EchoJob, Watcher, kill_one, make_rows, processes_of, wait_until
from safetensors.torch import load_file, save_file

import lorabatch
from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.jobs.record import JobState, is_version_id
from lorabatch.pipeline.dataset.answers import BegunRow, RowAnswer, decode_journal
from lorabatch.tests.end_to_end.bucket import Bucket, s3_server

NAMES = ("rank1", "rank8", "rank20")
WEIGHTS = "adapter_model.safetensors"
LONG_FAULTS = ("infinite", "no effect")


class Logged:
    """A bucket, and the requests that its server has had."""

    def __init__(self, bucket: Bucket, log: Path) -> None:
        self.bucket, self._log = bucket, log

    def requests(self, until_s: float = float("inf")) -> list[tuple[str, str, int]]:
        """Method, path and bytes of each request up to a time in seconds since the epoch."""
        lines = (line.split(" ") for line in self._log.read_text().splitlines())
        return [(method, path, int(num)) for at_s, method, path, num in lines if float(at_s) <= until_s]


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_server(tmp_path, LOG=str(tmp_path / "log")) as bucket:
        bucket.fs.mkdir("bucket")
        yield Logged(bucket, tmp_path / "log")


def run_on_s3(job: EchoJob, bucket: Bucket, **options: Any) -> Any:
    given = {"adapters": "s3://bucket/adapters", "storage_options": bucket.options, "workers": 1}
    return job.run(**given | options)


def changed(folder: Path, change: float) -> None:
    """Write the adapter's first tensor with another number."""
    tensors = load_file(folder / WEIGHTS)
    first = next(name for name in tensors if "lora_B" in name)
    tensors[first].view(-1)[0] = change
    save_file(tensors, folder / WEIGHTS)


def put_in_parts(bucket: Bucket, name: str) -> None:
    """Store a file again with the same content, so that its tag is another one."""
    place, fs = {"Bucket": "bucket", "Key": name}, bucket.fs
    content = fs.cat_file(f"bucket/{name}")
    upload = place | {"UploadId": fs.call_s3("create_multipart_upload", **place)["UploadId"]}
    tag = fs.call_s3("upload_part", **upload, PartNumber=1, Body=content)["ETag"]
    parts = {"Parts": [{"ETag": tag, "PartNumber": 1}]}
    fs.call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)


def test_adapters_in_a_store_are_opened_by_their_headers(echo_job: EchoJob, logged: Logged, tmp_path: Path) -> None:
    for number in range(9):
        shutil.copytree(echo_job.adapters / "rank8", echo_job.adapters / f"copy{number}")
        changed(echo_job.adapters / f"copy{number}", number + 1.0)
        (echo_job.adapters / f"copy{number}" / "optimizer.pt").write_bytes(bytes(1 << 20))
    rows = make_rows(64, (None, *NAMES, *(f"copy{number}" for number in range(9))))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    frozen_s: list[float] = []
    is_frozen = Watcher(
        lambda state: (echo_job.output / "_lorabatch" / "job.json").exists(),
        lambda: frozen_s.append((echo_job.output / "_lorabatch" / "job.json").stat().st_mtime),
    )
    result = run_on_s3(echo_job, logged.bucket, progress=is_frozen)
    echo_job.assert_answered(rows)
    # of the last report before the end: a fetch may come later
    assert 0 < result.adapter_use.storage_fetches <= len(NAMES) + 9
    assert result.adapter_use.fetch_s > 0
    served = echo_job.record.adapters
    assert all(is_version_id(adapter.sha256) and adapter.files for adapter in served)
    by_client = logged.requests(frozen_s[0])
    assert len(by_client) <= 3 * len(served) + 4, by_client
    whole = sum((folder / WEIGHTS).stat().st_size for folder in echo_job.adapters.iterdir())
    assert not any("optimizer" in path for _, path, _ in logged.requests() if "list-type" not in path)
    assert sum(num for _, path, num in by_client if WEIGHTS in path) < whole
    # those of the copies are alike: read once by the client and once by the worker
    configs = [path for _, path, _ in logged.requests() if "adapter_config.json" in path]
    alike = {(folder / "adapter_config.json").read_bytes() for folder in echo_job.adapters.iterdir()}
    assert len(configs) == len(alike) + len(NAMES), "\n".join(configs)
    found = {row["id"]: (row["completion"], row["adapter_sha256"]) for row in echo_job.rows()}
    shutil.rmtree(echo_job.output)
    echo_job.run(workers=1)
    assert found == {row["id"]: (row["completion"], row["adapter_sha256"]) for row in echo_job.rows()}


def test_rows_whose_adapters_are_here_do_not_wait_for_other_adapters(echo_job: EchoJob, logged: Logged) -> None:
    rows = make_rows(24, (None, *NAMES))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    with held_back("rank8", echo_job, logged.bucket) as journalled:
        run_on_s3(echo_job, logged.bucket, rows_per_shard=100)
    echo_job.assert_answered(rows)
    assert len({row.adapter_sha256 for row in journalled} - {None}) == len(NAMES) - 1


@pytest.mark.long
def test_stages_whose_adapters_are_here_do_not_wait_for_other_adapters(echo_job: EchoJob, logged: Logged) -> None:
    rows = [{"id": i, "tenant": (None, "rank1", "rank20")[i % 3], "body": f"parcel {i}"} for i in range(30)]
    stages = {
        "draft": {"adapter": {"column": "tenant"}, "prompt": "{{ body }}"},
        "fix": {"adapter": "rank8", "prompt": "{{ draft.completion }}", "max_tokens": 2},
    }
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    with held_back("rank8", echo_job, logged.bucket) as journalled:
        run_on_s3(echo_job, logged.bucket, stages=stages, rows_per_shard=100)
    found = echo_job.rows()
    assert [row["id"] for row in found] == list(range(30))
    assert {row["error"] for row in found} == {None}
    assert all(row["draft"]["completion"] and row["fix"]["completion"] for row in found)
    assert len(journalled) >= 10, "the drafts of a shard are answered while the adapter of their next stage is fetched"
    shutil.rmtree(echo_job.output)
    echo_job.run(stages=stages, workers=1)
    assert echo_job.rows() == found


@pytest.mark.long
def test_a_worker_that_leaves_while_it_fetches_hands_over_what_its_rows_have(echo_job: EchoJob, logged: Logged) -> None:
    rows = make_rows(64, (None, *NAMES))
    echo_job.write_input(rows)
    trace = echo_job.folder / "generated"
    echo_job.set_engine(step_s=0.1, trace=str(trace))
    logged.bucket.put(echo_job.adapters, "adapters")
    state = echo_job.output / "_lorabatch"

    def generated() -> int:
        return sum(map(int, trace.read_text().split())) if trace.exists() else 0

    def hold_back_and_leave() -> None:
        wait_until((state / "job.json").exists)
        logged.bucket.fail("silent GET /bucket/adapters/rank8/")
        try:
            wait_until(lambda: generated() > 150)
            os.kill(processes_of(os.getpid(), "worker")[0].pid, signal.SIGTERM)
            before = generated()
            wait_until(lambda: generated() > before + 50)
        finally:
            logged.bucket.hold.with_suffix(".fault").unlink()

    leaving = threading.Thread(target=hold_back_and_leave)
    leaving.start()
    job = {"max_tokens": 60, "batch_rows": 8, "rows_per_shard": 32, "migration": False, "workers": 2}
    run_on_s3(echo_job, logged.bucket, **job)
    leaving.join()
    echo_job.assert_answered(rows, max_tokens=60)
    assert generated() < 64 * 60 + 40


@contextmanager
def held_back(name: str, job: EchoJob, bucket: Bucket) -> Iterator[list[RowAnswer | BegunRow]]:
    """The store gives workers an adapter only once rows are journalled; these are added to the list."""
    state = job.output / "_lorabatch"
    journalled: list[RowAnswer | BegunRow] = []

    def hold() -> None:
        wait_until((state / "job.json").exists)
        bucket.fail(f"silent GET /bucket/adapters/{name}/")
        try:
            wait_until(lambda: any(state.glob("wip/*/*")))
            for path in state.glob("wip/*/*"):
                journalled.extend(decode_journal(path.read_bytes()))
        finally:
            bucket.hold.with_suffix(".fault").unlink()

    holding = threading.Thread(target=hold)
    holding.start()
    yield journalled
    holding.join()


@pytest.mark.parametrize("fault", ["nan", *(pytest.param(each, marks=pytest.mark.long) for each in LONG_FAULTS)])
@pytest.mark.long
def test_values_that_workers_refuse_cost_what_the_audit_says(echo_job: EchoJob, logged: Logged, fault: str) -> None:
    tensors = load_file(echo_job.adapters / "rank8" / WEIGHTS)
    first = next(name for name in tensors if "lora_B" in name)
    if fault == "no effect":
        tensors = {name: torch.zeros_like(each) if "lora_B" in name else each for name, each in tensors.items()}
    else:
        tensors[first][0, 0] = float("nan" if fault == "nan" else "inf")
    save_file(tensors, echo_job.adapters / "rank8" / WEIGHTS)
    echo_job.write_input(make_rows(32, (None, *NAMES)))
    logged.bucket.put(echo_job.adapters, "adapters")
    result = run_on_s3(echo_job, logged.bucket, max_errors="50%")
    found = echo_job.rows()
    shutil.rmtree(echo_job.output)
    echo_job.run(workers=1, max_errors="50%")
    compared = ("id", "completion", "adapter_sha256", "error", "finish_reason", "mode")
    assert [[row[name] for name in compared] for row in found] == [
        [row[name] for name in compared] for row in echo_job.rows()
    ]
    assert result.num_errors == 8
    assert {row["adapter"] for row in found if row["error"] is not None} == {"rank8"}


@pytest.mark.long
def test_a_resumed_job_computes_rows_of_changed_adapters_only(echo_job: EchoJob, logged: Logged) -> None:
    rows = make_rows(32, (None, *NAMES))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    run_on_s3(echo_job, logged.bucket)
    before, parts = echo_job.record, echo_job.parts()
    # the same content under another tag, and under the same
    put_in_parts(logged.bucket, f"adapters/rank1/{WEIGHTS}")
    logged.bucket.put(echo_job.adapters / "rank20" / WEIGHTS, f"adapters/rank20/{WEIGHTS}")
    run_on_s3(echo_job, logged.bucket)
    assert (echo_job.record.adapters, echo_job.parts()) == (before.adapters, parts)
    changed(echo_job.adapters / "rank8", 5.0)
    logged.bucket.fs.put_file(str(echo_job.adapters / "rank8" / WEIGHTS), f"bucket/adapters/rank8/{WEIGHTS}")
    result = run_on_s3(echo_job, logged.bucket)
    echo_job.assert_answered(rows)
    assert result.num_reused == 24
    ids = {adapter.name: adapter.sha256 for adapter in echo_job.record.adapters}
    old = {adapter.name: adapter.sha256 for adapter in before.adapters}
    assert {name for name in ids if ids[name] != old[name]} == {"rank8"}


@pytest.mark.long
def test_an_update_keeps_answers_of_adapters_that_are_as_they_were(echo_job: EchoJob, logged: Logged) -> None:
    rows = make_rows(32, (None, *NAMES))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    run_on_s3(echo_job, logged.bucket)
    put_in_parts(logged.bucket, f"adapters/rank1/{WEIGHTS}")
    changed(echo_job.adapters / "rank8", 5.0)
    logged.bucket.fs.put_file(str(echo_job.adapters / "rank8" / WEIGHTS), f"bucket/adapters/rank8/{WEIGHTS}")
    rows = make_rows(40, (None, *NAMES))
    echo_job.write_input(rows)
    result = run_on_s3(echo_job, logged.bucket, update=True)
    echo_job.assert_answered(rows)
    assert result.num_reused == 24
    parts = echo_job.parts()
    run_on_s3(echo_job, logged.bucket, update=True)
    assert echo_job.parts() == parts


@pytest.mark.long
def test_a_job_goes_on_with_the_same_adapters_from_a_disk(echo_job: EchoJob, logged: Logged) -> None:
    rows = make_rows(32, (None, *NAMES))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    run_on_s3(echo_job, logged.bucket)
    parts = echo_job.parts()
    echo_job.run(workers=1)
    assert echo_job.parts() == parts
    (echo_job.output / "_SUCCESS").unlink()
    (echo_job.output / "part-00000.parquet").unlink()
    echo_job.run(workers=1)
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_an_adapter_that_changes_before_it_is_read_costs_its_rows_until_the_next_run(
    echo_job: EchoJob, logged: Logged
) -> None:
    rows = make_rows(32, (None, *NAMES))
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")

    def change() -> None:
        changed(echo_job.adapters / "rank8", 7.0)
        logged.bucket.fs.put_file(str(echo_job.adapters / "rank8" / WEIGHTS), f"bucket/adapters/rank8/{WEIGHTS}")

    is_frozen = Watcher(lambda state: (echo_job.output / "_lorabatch" / "job.json").exists(), change)
    run_on_s3(echo_job, logged.bucket, max_errors="50%", progress=is_frozen)
    errors = {row["adapter"]: row["error"] for row in echo_job.rows() if row["error"] is not None}
    assert set(errors) == {"rank8"}
    assert "has changed in s3://bucket/adapters/rank8" in errors["rank8"]
    assert RUN_AGAIN in errors["rank8"]
    run_on_s3(echo_job, logged.bucket, max_errors="50%")
    echo_job.assert_answered(rows)


@pytest.mark.long
def test_a_worker_killed_while_it_fetches_loses_nothing(
    echo_job: EchoJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = make_rows(32, (None, *NAMES))
    echo_job.write_input(rows)
    with s3_server(tmp_path, DELAY_S="0.2", LOG=str(tmp_path / "log")) as bucket:
        bucket.fs.mkdir("bucket")
        bucket.put(echo_job.adapters, "adapters")
        fetched = tmp_path / "cache" / "lorabatch" / "adapter-copies"
        killed = Watcher(lambda state: any(fetched.glob(".fetch-*")), lambda: kill_one("worker"))
        run_on_s3(echo_job, bucket, progress=killed, workers=2)
        assert killed.has_acted
    echo_job.assert_answered(rows)
    learnt = [json.loads(path.read_text()) for path in (echo_job.output / "_lorabatch" / "adapters").iterdir()]
    assert len({each["sha256"] for each in learnt}) == len(NAMES)
    assert not list(fetched.glob(".fetch-*/*"))


@pytest.mark.long
def test_a_tenth_of_all_adapters_on_the_disk_gives_the_same_answers(
    echo_job: EchoJob, logged: Logged, tmp_path: Path
) -> None:
    for number in range(20):
        shutil.copytree(echo_job.adapters / "rank8", echo_job.adapters / f"copy{number}")
        changed(echo_job.adapters / f"copy{number}", number + 1.0)
    names = [f"copy{number}" for number in range(20)]
    rows = make_rows(200, names)
    echo_job.write_input(rows)
    logged.bucket.put(echo_job.adapters, "adapters")
    size = sum(path.stat().st_size for path in (echo_job.adapters / "copy0").iterdir())
    most: list[int] = []
    copies = tmp_path / "cache" / "lorabatch" / "adapter-copies"

    class Watching(Watcher):
        def update(self, state: JobState) -> None:
            most.append(len(list(copies.glob("copy*"))))

    watching = Watching(lambda state: False, lambda: None)
    run_on_s3(echo_job, logged.bucket, adapter_disk_bytes=2 * size, rows_per_shard=10, progress=watching, workers=2)
    echo_job.assert_answered(rows)
    assert len(list(copies.glob("copy*"))) < len(names)


@pytest.mark.long
def test_rows_that_name_an_adapter_of_another_tenant_are_errors_before_any_engine(echo_job: EchoJob) -> None:
    rows = [row | {"tenant": "acme" if row["id"] % 3 else None} for row in make_rows(32, (None, *NAMES))]
    echo_job.write_input(rows)
    rule = {"tenant": {"acme": ["rank1", "rank2*"], "*": "rank8"}}
    planned = lorabatch.plan(**echo_job.options(allowed_adapters=rule, max_errors="80%"))
    result = echo_job.run(workers=1, allowed_adapters=rule, max_errors="80%")
    free = {"acme": (None, "rank1", "rank20"), None: (None, "rank8")}
    wrong = {row["id"] for row in rows if row["adapter"] not in free[row["tenant"]]}
    found = {row["id"]: row["error"] for row in echo_job.rows() if row["error"] is not None}
    assert wrong
    assert found.keys() == wrong
    assert all("not allowed" in error for error in found.values())
    assert [kind.kind for kind in result.errors] == ["not_allowed"]
    assert planned.num_errors == len(wrong) == result.num_errors
