"""Measures what adding a slow worker does to the seconds of a job.

python -m lorabatch.benchmarks.slow_worker_bench [--slowness 4 10] [--repeats 3] [--save FILE]

Real engines on the demo's base and adapters, one thread each; answers have the lengths that the model gives them. One
worker alone is compared with the same worker beside one whose engine process is stopped for most of every fifth of a
second, so that it gets one of `slowness` parts of its time. The ideal split gives both what they could do all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.demo.job import DEMO_FOLDER, demo_spec
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.run import run

_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds from the first shard opened to the last part written, one per repeat. `slowness` None: one worker."""

    slowness: float | None
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds of the repeats."""
        return statistics.median(self.seconds)


def rows_of_the_demo(folder: Path, copies: int) -> Path:
    """The demo's prompts, several times, with ids of their own."""
    table = pq.read_table(DEMO_FOLDER / "prompts.parquet")
    parts = [
        table.set_column(0, "id", pa.array([f"{row}-{copy}" for row in table["id"].to_pylist()]))
        for copy in range(copies)
    ]
    path = folder / "input.parquet"
    pq.write_table(pa.concat_tables(parts), path)
    return path


def seconds_of(spec: JobSpec, slowness: float | None) -> float:
    """Run the job; the engine that starts last is slowed down."""
    with contextlib.nullcontext() if slowness is None else one_slowed(slowness):
        result = run(spec)
    assert result.num_errors == 0, result
    assert result.working_s is not None
    return result.working_s


@contextlib.contextmanager
def one_slowed(slowness: float) -> Iterator[None]:
    """Slows down the second of two engines that start within the block: it runs for 1 / `slowness` of the time."""
    is_over = threading.Event()
    slowing = threading.Thread(target=_slow_down, args=(slowness, is_over))
    slowing.start()
    try:
        yield
    finally:
        is_over.set()
        slowing.join()


def _slow_down(slowness: float, is_over: threading.Event) -> None:
    while not is_over.wait(0.2):
        engines = _engine_processes()
        if len(engines) == 2:
            break
    while not is_over.wait(_PERIOD_S / slowness):
        with contextlib.suppress(ProcessLookupError):
            os.kill(engines[-1], signal.SIGSTOP)
            time.sleep(_PERIOD_S * (1 - 1 / slowness))
            os.kill(engines[-1], signal.SIGCONT)


def _engine_processes() -> list[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "lorabatch.engine.server.process" in process.cmdline():
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.slow_worker_bench", description=__doc__)
    parser.add_argument("--slowness", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="of the demo's 256 prompts")
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    kinds: list[float | None] = [None, *chosen.slowness]
    seconds: dict[float | None, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        input_path = rows_of_the_demo(Path(folder), chosen.copies)
        for repeat in range(chosen.repeats):
            for kind in kinds:
                output = Path(folder) / f"output-{repeat}-{kind}"
                spec = demo_spec(output, workers=2 if kind else 1, overwrite=False)
                options = {"input": str(input_path), "batch_rows": 16, "engine_threads": 1}
                seconds[kind].append(seconds_of(spec.model_copy(update=options), kind))
    found = [Measured(kind, tuple(values)) for kind, values in seconds.items()]
    alone_s = found[0].median_s
    for measured in found:
        name = f"and one {measured.slowness:g} times slower" if measured.slowness else "one worker alone"
        seconds_text = ", ".join(f"{value:.1f}" for value in measured.seconds)
        line = f"{name:28} {measured.median_s:6.1f} s ({seconds_text})"
        if measured.slowness:
            ideal_s = alone_s / (1 + 1 / measured.slowness)
            line += f", {measured.median_s / alone_s:.3f} of alone, {measured.median_s / ideal_s:.3f} of ideal"
        print(line)
    if chosen.save:
        meta = {"commit": commit(), "cpu": cpu_name(), "copies": chosen.copies}
        chosen.save.write_text(json.dumps({**meta, "found": [asdict(measured) for measured in found]}, indent=1))


if __name__ == "__main__":
    main()
