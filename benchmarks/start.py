"""How long a small job takes to start and to end, by phase.

python -m lorabatch.benchmarks.start [--workers 1 2] [--repeats 5] [--save FILE]

Runs `lorabatch run` as a user does: 64 rows of the demo on its base model and adapters, one of them of a single token.
Phases are seen from outside: files that appear in the output, processes, times in the job's log.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.job import DEMO_FOLDER, demo_spec

_NUM_ROWS = 64
_MAX_TOKENS = 60
_POLL_S = 0.005
# Pattern of files below `_lorabatch` in the output -> the phase that ends when one appears.
_FILES = {"job.json": "opened", "index/chunk-*": "indexed", "plan.arrow": "planned"}
# Text in a worker's log -> the phase that ends with the first line that has it.
_LINES = {"ready after": "engine ready", "first row": "first row finished"}
_PROCESSES = {"multiprocessing.spawn": "worker process", "lorabatch.engine.server.process": "engine process"}
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - (.*)$", re.MULTILINE)


def write_input(folder: Path) -> Path:
    """Rows of the demo; the first asks for one token, so that its end is that of its prompt."""
    table = pq.read_table(DEMO_FOLDER / "prompts.parquet").slice(0, _NUM_ROWS)
    column = table.schema.get_field_index("max_tokens")
    tokens = pa.array([1] + [_MAX_TOKENS] * (_NUM_ROWS - 1), pa.int32())
    path = folder / "input.parquet"
    pq.write_table(table.set_column(column, "max_tokens", tokens), path)
    return path


def phases_of_run(input_path: Path, folder: Path, workers: int) -> dict[str, float]:
    """Phase -> seconds from the command to its end."""
    spec = demo_spec(folder / "output", workers=workers, overwrite=False)
    command = [
        sys.executable,
        "-m",
        "lorabatch",
        "run",
        "--model",
        spec.model,
        "--adapters",
        str(DEMO_FOLDER / "adapters"),
    ]
    command += ["--input", str(input_path), "--output", spec.output, "--workers", str(workers)]
    command += ["--row-settings", "max_tokens"]
    began, began_s = datetime.now(), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    phases: dict[str, float] = {}
    state = Path(spec.output) / "_lorabatch"
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        for pattern, phase in _FILES.items():
            if phase not in phases and any(state.glob(pattern)):
                phases[phase] = time.monotonic() - began_s
        if "engine process" not in phases:
            _see_processes(parent, phases, began_s)
        if "answered" not in phases and (Path(spec.output) / "_SUCCESS").exists():
            phases["answered"] = time.monotonic() - began_s
        time.sleep(_POLL_S)
    phases["prompt is back"] = time.monotonic() - began_s
    assert process.stdout is not None
    if process.returncode:
        raise RuntimeError(process.stdout.read().decode())
    return phases | _phases_in_logs(state / "logs", began)


def _see_processes(parent: psutil.Process, phases: dict[str, float], began_s: float) -> None:
    for child in parent.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        for part, phase in _PROCESSES.items():
            if part in words and "resource_tracker" not in words:
                phases.setdefault(phase, time.monotonic() - began_s)


def _phases_in_logs(folder: Path, began: datetime) -> dict[str, float]:
    """The first of each line, over all logs of the workers."""
    found: dict[str, float] = {}
    for path in folder.glob("worker-*.log"):
        for stamp, text in _TIME.findall(path.read_text(encoding="utf-8")):
            for part, phase in _LINES.items():
                if part in text:
                    seconds = (datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f") - began).total_seconds()
                    found[phase] = min(seconds, found.get(phase, seconds))
    return found


def to_text(runs: Mapping[int, Sequence[Mapping[str, float]]]) -> str:
    """A table: phases down, worker counts across, medians and ranges."""
    lines = ["| phase ends, seconds from the command | " + " | ".join(f"{n} workers" for n in runs) + " |"]
    lines.append("|---|" + "---:|" * len(runs))
    example = next(iter(runs.values()))[-1]
    for phase in sorted(example, key=example.__getitem__):
        cells = [[run[phase] for run in many if phase in run] for many in runs.values()]
        texts = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" if c else "" for c in cells]
        lines.append(f"| {phase} | " + " | ".join(texts) + " |")
    for first, last in (("answered", "prompt is back"), ("engine process", "engine ready")):
        medians = (statistics.median(run[last] - run[first] for run in many) for many in runs.values())
        lines.append(f"| of it from {first!r} to {last!r} | " + " | ".join(f"{m:.2f}" for m in medians) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path, help="JSON file for the result.")
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {number: [] for number in options.workers}
    with tempfile.TemporaryDirectory() as scratch:
        input_path = write_input(Path(scratch))
        for repeat in range(options.repeats):
            for number, many in runs.items():
                folder = Path(scratch) / f"{number}-{repeat}"
                folder.mkdir()
                many.append(phases_of_run(input_path, folder, number))
    print(to_text(runs))
    if options.save:
        result = {**provenance(["torch", "distributed"]), "runs": runs}
        options.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
