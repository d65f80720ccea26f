"""`record_demo`: runs the demo's job and keeps what the job removes at its end, or never writes to its output."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lorabatch.benchmarks.journey.watched_engine import FACTORY, FOLDER, Note, read_notes
from lorabatch.demo.job import demo_spec
from lorabatch.jobs.contents import OURS
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.cluster.connect import connected
from lorabatch.pipeline.messages import WorkerReport
from lorabatch.pipeline.monitoring.topics import REPORTS
from lorabatch.pipeline.run import run

# Seconds between two looks at the output of the running job.
_LOOK_INTERVAL_S = 0.1
_NUM_WORKERS = 2
_ROWS_LOGGER = "lorabatch.pipeline.supervisor.rows"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A finished job of the demo."""

    #: The job as it was asked.
    spec: JobSpec
    #: Its output.
    store: JobStore
    #: The files that its output had while it ran.
    kept: JobStore
    #: Reports of all workers, the oldest first.
    reports: tuple[WorkerReport, ...]
    #: Notes of each engine, the oldest first.
    notes: tuple[tuple[Note, ...], ...]


def record_demo(folder: Path) -> RecordedRun:
    """Run the demo's job with two workers. `folder`: an empty folder for all files of the run.

    Measurements of earlier jobs are neither used nor written, so that the plan is that of a first run. Raises what
    `pipeline.run.run` raises.
    """
    output, kept, notes = (folder / name for name in ("output", "kept", "notes"))
    notes.mkdir()
    os.environ |= {FOLDER: str(notes), "LORABATCH_HISTORY": "off"}
    spec = demo_spec(output, workers=_NUM_WORKERS, overwrite=False)
    store = JobStore(str(output))
    with _one_core(), connected(spec) as client, _files_kept(output, kept):
        client.run(_log_states)
        run(spec, client=client, engine_factory=FACTORY)
        reports = REPORTS.published(client, store.read_events()[0]["run_id"])
    return RecordedRun(
        spec,
        store,
        JobStore(str(kept)),
        tuple(report for _, report in reports),
        tuple(tuple(read_notes(path)) for path in sorted(notes.iterdir())),
    )


@contextmanager
def _one_core() -> Iterator[None]:
    """Within the block this process and its children have one core: answers are journalled once a second, and a faster
    engine has all of a shard's before.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _log_states() -> None:
    """Have a worker's log name each change of a row's state."""
    logging.getLogger(_ROWS_LOGGER).setLevel(logging.DEBUG)


@contextmanager
def _files_kept(output: Path, kept: Path) -> Iterator[None]:
    """Within the block, files of the job get second names in `kept`, under which they stay when the job removes
    them. Files of a job are replaced or appended to, never rewritten.
    """
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(_LOOK_INTERVAL_S):
            for name in (path.relative_to(output) for path in output.glob(f"{OURS}/**/*.*")):
                path, second = output / name, kept / name
                second.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(path, second)

    thread = threading.Thread(target=keep, name="second names of files")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
