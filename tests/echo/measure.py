"""Measurements of the cluster side, for `benchmarks/README.md`: `python tests/echo/measure.py WHAT FOLDER NUMBERS…`.

`slow` (rows), `rows` (rows in a row group, then rows), `adapters`, `files` and `shards` (of each that many), and
`placement` (workers, rows, adapters, milliseconds until one is there) use `echo_engine`, whose steps take as long as
configured: what is measured is everything else. Clusters have the settings of docs/guides/clusters.md, or, with the
variable `DASK_CONFIG`, those of that folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
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
    run_and_print(job, num_rows, f"{num_rows} rows in groups of {rows_per_group}", **options)


def measure_adapters(folder: Path, num_adapters: int) -> None:
    """20,000 rows of one token in 100 shards."""
    job, num_rows = make_job(folder, 1), 20_000
    copy_adapters(job, num_adapters)
    names = [f"adapter-{i * 7919 % num_adapters:05}" for i in range(num_rows)]
    job.write_input([row | {"adapter": name} for row, name in zip(make_rows(num_rows), names, strict=True)], 5000)
    options = {"adapters": str(job.folder / "many"), "rows_per_shard": 200}
    run_and_print(job, num_rows, f"{num_adapters} adapters", **options)


def measure_files(folder: Path, num_files: int) -> None:
    """Four rows of one token in each."""
    job, rows = make_job(folder, 1), make_rows(4 * num_files)
    (folder / "files").mkdir()
    for number in range(num_files):
        table = pa.Table.from_pylist(rows[4 * number : 4 * number + 4])
        pq.write_table(table, folder / "files" / f"{number:05}.parquet")
    run_and_print(job, len(rows), f"{num_files} files", input=str(folder / "files"), rows_per_shard=2000)


def measure_shards(folder: Path, num_shards: int) -> None:
    """A hundred rows of one token in each, in batches as an engine on a CPU has them."""
    num_rows = 100 * num_shards
    job = make_job(folder, num_rows, 20_000)
    run_and_print(job, num_rows, f"{num_shards} shards", rows_per_shard=100, batch_rows=64)


def measure_placement(folder: Path, num_workers: int, num_rows: int, num_adapters: int, adapter_ms: int) -> None:
    """The same job with its planned placement and without, three times each in turns. Adapters follow Zipf's law and
    arrive one after another.
    """
    job = make_job(folder, 1)
    copy_adapters(job, num_adapters)
    generator = np.random.default_rng(0)
    popularity = 1.0 / np.arange(1, num_adapters + 1)
    drawn = generator.choice(num_adapters, num_rows, p=popularity / popularity.sum())
    lengths = np.clip(generator.lognormal(np.log(40), 0.6, num_rows), 1, 160).astype(int)
    rows = [
        row | {"adapter": f"adapter-{adapter:05}", "max_tokens": int(length)}
        for row, adapter, length in zip(make_rows(num_rows), drawn, lengths, strict=True)
    ]
    job.write_input(rows, 500)
    job.set_engine(step_s=0.05, adapter_s=adapter_ms / 1e3)
    given = {"adapters": str(job.folder / "many"), "rows_per_shard": 16, "row_settings": "all", "overwrite": True}
    seconds: dict[str, list[float]] = {"none": [], "planned": []}
    with own_cluster(num_workers) as client:
        for _ in range(3):
            for placement, taken in seconds.items():
                job.run(client, placement=placement, workers=num_workers, **given)
                taken.append(makespan_s(job))
                print(f"{placement}: {taken[-1]:.1f} s", flush=True)
    ratios = [planned / none for planned, none in zip(seconds["planned"], seconds["none"], strict=True)]
    print(f"planned over none: median {np.median(ratios):.3f}, each {', '.join(f'{r:.3f}' for r in ratios)}")


def copy_adapters(job: EchoJob, num_adapters: int) -> None:
    """Write adapters `adapter-00000` and so on into the job's folder `many`: one adapter with other scalings."""
    first = job.adapters / "rank1"
    config = json.loads((first / "adapter_config.json").read_text())
    shutil.rmtree(job.folder / "many", ignore_errors=True)
    for number in range(num_adapters):
        copy = job.folder / "many" / f"adapter-{number:05}"
        copy.mkdir(parents=True)
        (copy / "adapter_model.safetensors").hardlink_to(first / "adapter_model.safetensors")
        (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1 + number}))


def run_and_print(job: EchoJob, num_rows: int, what: str, **options: Any) -> None:
    """Run a job of rows of one token on two workers of an existing cluster. Prints seconds, what each process took of
    a processor, and the largest process of each kind after each quarter of the job.
    """
    job.set_engine(step_s=0.0)
    given = {"max_tokens": 1, "batch_rows": 1024, "step_tokens": 4096} | options
    with existing_cluster(job.folder, num_workers=2) as (address, workers, scheduler):
        groups = {"client": [os.getpid()], "scheduler": [scheduler.pid], "workers": [w.pid for w in workers]}
        with Client(address, set_as_default=False) as client, usage_of(groups) as samples:
            began_s = time.monotonic()
            result = job.run(client, **given)
            seconds = time.monotonic() - began_s
    assert (result.num_rows, result.num_errors) == (num_rows, 0)
    before, after = samples[0], samples[-1]
    taken = {name: used[0] - before[name][0] for name, used in after.items()}
    print(f"{what}: {seconds:.1f} s, {1e3 * seconds / num_rows:.3f} ms a row")
    print("  CPU: " + ", ".join(f"{name} {cpu_s:.1f} s" for name, cpu_s in taken.items()))
    for name in after:
        sizes = [samples[len(samples) * quarter // 4 - 1][name][1] / 2**20 for quarter in range(1, 5)]
        print(f"  {name}: " + ", ".join(f"{size:.0f}" for size in sizes) + " MiB", flush=True)


Usage = Mapping[str, tuple[float, int]]


@contextmanager
def usage_of(groups: dict[str, list[int]]) -> Iterator[list[Usage]]:
    """Twice a second, of each group and of engines: seconds of CPU of all processes so far, their children (engines
    apart) included, and bytes of the largest.
    """
    samples: list[Usage] = []
    ended: dict[str, dict[int, float]] = {name: {} for name in (*groups, "engines")}
    is_over = threading.Event()

    def look() -> None:
        sizes = dict.fromkeys(ended, 0)
        for name, pids in groups.items():
            for process in (p for pid in pids for p in family(pid, name == "workers")):
                with suppress(psutil.Error):
                    is_engine = "lorabatch.engine.server.process" in " ".join(process.cmdline())
                    key, times = "engines" if is_engine else name, process.cpu_times()
                    ended[key][process.pid] = times.user + times.system
                    sizes[key] = max(sizes[key], process.memory_info().rss)
        samples.append({name: (sum(ended[name].values()), size) for name, size in sizes.items()})

    def watch() -> None:
        while not is_over.wait(0.5):
            look()

    look()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def family(pid: int, with_children: bool) -> list[psutil.Process]:
    """A process, and those that it has started; none where it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *(process.children(recursive=True) if with_children else [])]
    return []


def recommended_settings(folder: Path) -> None:
    """Have Dask take the settings of docs/guides/clusters.md, here and in all processes that are started from here."""
    guide = (REPOSITORY / "docs" / "guides" / "clusters.md").read_text("utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dask.yaml").write_text(shown, encoding="utf-8")
    os.environ["DASK_CONFIG"] = str(folder)
    dask.config.refresh()


def main() -> None:
    """What is asked for, in a folder that is made anew."""
    if "DASK_CONFIG" not in os.environ:
        recommended_settings(Path(sys.argv[2]).with_suffix(".dask"))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ECHO_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    what, folder, *numbers = sys.argv[1:]
    match what:
        case "make":
            write_job(Path(folder), *map(int, numbers))
        case "slow":
            for number in numbers or ["96"]:
                measure_slow_worker(Path(folder), int(number))
        case "adapters" | "files" | "shards":
            measure = {"adapters": measure_adapters, "files": measure_files, "shards": measure_shards}[what]
            for number in numbers:
                measure(Path(folder), int(number))
        case "rows":
            rows_per_group, *numbers = numbers
            for number in numbers:
                measure_many_rows(Path(folder), int(rows_per_group), int(number))
        case "placement":
            measure_placement(Path(folder), *map(int, numbers))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
