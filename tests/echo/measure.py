"""Measurements of the cluster side, for docs/operations.md: `python tests/echo/measure.py WHAT FOLDER NUMBERS…`.

`slow` (rows) and `rows` (rows in a row group, then rows) use `echo_engine`, whose steps take as long as configured:
what is measured is everything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from cluster_under_test import existing_cluster, own_cluster
from distributed import Client
from echo_job import ECHO_FOLDER, EchoJob, make_rows

REPOSITORY = Path(__file__).resolve().parents[2]


def make_job(folder: Path, num_rows: int, rows_per_group: int = 64) -> EchoJob:
    """A job on a tiny model folder with its adapters and input, made anew in a process of its own: what that takes is
    not the client's.
    """
    subprocess.run([sys.executable, __file__, "make", folder, str(num_rows), str(rows_per_group)], check=True)
    return EchoJob(folder)


def write_job(folder: Path, num_rows: int, rows_per_group: int) -> None:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from conftest import write_adapter, write_model

    shutil.rmtree(folder, ignore_errors=True)
    model = write_model(folder / "model")
    for rank in (1, 8, 20):
        write_adapter(folder / "adapters" / f"rank{rank}", model, r=rank)
    EchoJob(folder).write_input(make_rows(num_rows), rows_per_group)


def makespan_s(job: EchoJob) -> float:
    """From the first shard opened to the last one committed."""
    events = job.store.read_events()
    times: dict[str, list[float]] = defaultdict(list)
    last_s = 0.0
    for record in events:
        last_s = record.get("time_s", last_s)
        times[record["kind"]].append(last_s)
    return times["ShardCommitted"][-1] - times["RunShard"][0]


def measure_slow_worker(
    folder: Path, num_rows: int = 96, tokens: int = 60, batch: int = 8, step_s: float = 0.05
) -> None:
    """One of two workers takes four times longer: with and without migration, beside the ideal split."""
    job, rows = make_job(folder, num_rows), make_rows(num_rows)
    ideal_s = num_rows / batch * tokens * step_s / (1 + 1 / 4)
    print(f"{num_rows} rows of {tokens} tokens, batches of {batch}, steps of {step_s} s; ideal split {ideal_s:.1f} s")
    for migration in (False, True):
        (job.model / "slow").unlink(missing_ok=True)
        job.set_engine(step_s=step_s, slow_factor=4)
        with own_cluster(2) as client:
            options = {"max_tokens": tokens, "batch_rows": batch, "rows_per_shard": batch, "overwrite": True}
            result = job.run(client, migration=migration, **options)
        job.assert_answered(rows, max_tokens=tokens)
        seconds = makespan_s(job)
        num_moves = sum(record["kind"] == "MigrateRows" for record in job.store.read_events())
        measured = f"{seconds:.1f} s, {seconds / ideal_s:.2f} of ideal, {num_moves} loans"
        print(f"migration {migration}: {measured}, batches {result.batch_fill:.1%} full until the tail", flush=True)


def measure_many_rows(folder: Path, rows_per_group: int, num_rows: int) -> None:
    """Tiny rows through engines that take no time: what a row costs beside its engine, and who grows."""
    job = make_job(folder, num_rows, rows_per_group)
    job.set_engine(step_s=0.0)
    options = {"max_tokens": 1, "batch_rows": 1024, "rows_per_shard": 2000, "step_tokens": 4096}
    with existing_cluster(folder, num_workers=2) as (address, workers, scheduler):
        groups = {"client": [os.getpid()], "scheduler": [scheduler.pid], "workers": [w.pid for w in workers]}
        with Client(address, set_as_default=False) as client, peak_bytes(groups) as peaks:
            began_s = time.monotonic()
            result = job.run(client, **options)
            seconds = time.monotonic() - began_s
    assert result.num_rows == num_rows
    shown = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in peaks.items())
    measured = f"{seconds:.1f} s, {1e3 * seconds / num_rows:.3f} ms a row"
    print(f"{num_rows} rows in groups of {rows_per_group}: {measured}; peak of the largest: {shown}")


@contextmanager
def peak_bytes(groups: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    """Largest resident size of any process of each group, their children (engines apart) included."""
    peaks: dict[str, int] = dict.fromkeys([*groups, "engines"], 0)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            for name, pids in groups.items():
                for process in (p for pid in pids for p in family(pid, name == "workers")):
                    with suppress(psutil.Error):
                        is_engine = "lorabatch.engine.server.process" in " ".join(process.cmdline())
                        key = "engines" if is_engine else name
                        peaks[key] = max(peaks[key], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def family(pid: int, with_children: bool) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *(process.children(recursive=True) if with_children else [])]


def main() -> None:
    """What is asked for, in a folder that is made anew."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ECHO_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    what, folder, *numbers = sys.argv[1:]
    match what:
        case "make":
            write_job(Path(folder), *map(int, numbers))
        case "slow":
            for number in numbers or ["96"]:
                measure_slow_worker(Path(folder), int(number))
        case "rows":
            rows_per_group, *numbers = numbers
            for number in numbers:
                measure_many_rows(Path(folder), int(rows_per_group), int(number))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
