"""How much memory each process takes, and how long it takes, until a hostile input file is refused.

python -m lorabatch.benchmarks.input_bombs --model FOLDER [--only TEXT] [--save FILE]

Each file is given to `lorabatch plan`, which reads it in the command's own process, and, with more rows than that
checks early, to `lorabatch run`, which reads it on a worker. `--model`: any model folder; no weights are loaded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.provenance import provenance

_POLL_S = 0.02
# More than a command checks by itself before engines start.
_MANY_ROWS = 5000
_PROCESSES = {
    "lorabatch.system.confinement": "counting child",
    "multiprocessing.spawn": "worker",
    "lorabatch.engine.server.process": "engine",
    "-m lorabatch": "command",
}


def _dictionary(num_rows: int, value_bytes: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), ["x" * value_bytes])


def _write(path: Path, table: Mapping[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(table), path, compression="zstd", store_schema=False, **options)


def _messages(path: Path) -> None:
    content = _dictionary(_MANY_ROWS * 4, 1_000_000)
    role = pa.DictionaryArray.from_arrays(content.indices, ["user"])
    message = pa.StructArray.from_arrays([role, content], ["role", "content"])
    offsets = pa.array(range(0, len(content) + 1, 4), pa.int32())
    _write(path, {"messages": pa.ListArray.from_arrays(offsets, message)})


def _repeated(path: Path, begin: bytes, piece: bytes, times: int, end: bytes = b"") -> None:
    """A file of text with one piece many times, compressed if its name says so."""
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(begin)
        for _ in range(times):
            file.write(piece)
        file.write(end)


def _arrow(path: Path, column: pa.Array, batches: int = 1) -> None:
    table = pa.table({"prompt": column})
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _ in range(batches):
            writer.write_table(table)


def _fields(number: int) -> bytes:
    return json.dumps({"prompt": {str(field): 1 for field in range(number)}}).encode()


_MB = 1 << 20
BOMBS: Mapping[str, Callable[[Path], None]] = {
    "one value of 5 MB in 2,000 rows": lambda path: _write(path, {"prompt": _dictionary(2000, 5_000_000)}),
    "the same in 5,000 rows, on a worker": lambda path: _write(path, {"prompt": _dictionary(_MANY_ROWS, 5_000_000)}),
    "one content of 1 MB in 20,000 messages": _messages,
    "pages of zeros: 8 values of 300 MB": lambda path: _write(
        path, {"prompt": ["x" * 300_000_000] * 7 + ["y"]}, use_dictionary=False
    ),
    "5 million rows of nothing": lambda path: _write(path, {"prompt": pa.nulls(5 << 20)}, row_group_size=1 << 23),
    "a line of 2 GB (.csv)": lambda path: _repeated(path, b"prompt\n", b"x" * _MB, 2048),
    "a quote that is not closed before 2 GB (.csv)": lambda path: _repeated(path, b'prompt\n"', b"x\n" * _MB, 1024),
    "20 GB of zeros in 20 MB (.csv.gz)": lambda path: _repeated(path, b"prompt\n", b"0" * _MB, 20 << 10),
    "20 GB of short rows in 80 MB (.csv.gz)": lambda path: _repeated(
        path, b"prompt,n\n", b"a,1\n" * (_MB >> 2), 20 << 10
    ),
    "a line of 1 GB (.jsonl)": lambda path: _repeated(path, b'{"prompt": "', b"x" * _MB, 1024, b'"}'),
    "a list in 100,000 lists (.jsonl)": lambda path: _repeated(path, b'{"prompt": ', b"[", 100_000, b"]" * 100_000),
    "5 million empty lists on a line (.jsonl)": lambda path: _repeated(path, b'{"prompt": [', b"[],", 5 << 20, b"0]}"),
    "a million fields in an object (.jsonl)": lambda path: _repeated(path, b"", _fields(10**6), 1),
    "3 values of 300 MB in a batch (.arrow)": lambda path: _arrow(path, pa.array(["x" * (300 * _MB)] * 3)),
    "200 thousand million rows of nothing (.arrow)": lambda path: _arrow(path, pa.nulls((1 << 31) - 1), 100),
}


@dataclass(frozen=True)
class Refusal:
    """Outcome of one command on one hostile file."""

    #: Key of `BOMBS`.
    bomb: str
    #: Size of the file.
    file_bytes: int
    #: `plan` or `run`.
    command: str
    #: Seconds until the command ended.
    seconds: float
    #: Exit status of the command.
    exit_code: int
    #: Kind of process -> largest peak of resident memory of one process of that kind, in MiB.
    peak_mb: Mapping[str, int]
    #: Last line of the command's standard error; empty if it printed none.
    said: str


def refuse(name: str, path: Path, model: str, command: str) -> Refusal:
    """Give the file to a command and watch all its processes."""
    typed = [command, "--model", model, "--max-tokens", "8", "--input", str(path), "--workers", "1"]
    with tempfile.TemporaryDirectory() as folder:
        typed += ["--output", f"{folder}/output"] if command == "run" else []
        began_s = time.monotonic()
        started = subprocess.Popen(
            [sys.executable, "-m", "lorabatch", *typed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        peaks: dict[str, int] = {}
        while started.poll() is None:
            _look(started.pid, peaks)
            time.sleep(_POLL_S)
        seconds = time.monotonic() - began_s
        assert started.stderr is not None
        said = started.stderr.read().strip().splitlines()
    return Refusal(name, path.stat().st_size, command, seconds, started.returncode, peaks, said[-1] if said else "")


def _look(pid: int, peaks: dict[str, int]) -> None:
    """Note what the processes of a command have taken at most so far."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            line = " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.Error, OSError):
            continue
        kind = next((kind for part, kind in _PROCESSES.items() if part in line), "other")
        peak = next((int(text.split()[1]) >> 10 for text in status.splitlines() if text.startswith("VmHWM")), 0)
        peaks[kind] = max(peaks.get(kind, 0), peak)


def main() -> None:
    """Print a table, and save all numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--only", default="", help="files whose name holds this text")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, write in ((name, write) for name, write in BOMBS.items() if given.only in name):
            ending = name.partition("(.")[2].rstrip(")") or "parquet"
            path = Path(folder, f"bomb.{ending}")
            write(path)
            refusal = refuse(name, path, given.model, "run" if "worker" in name else "plan")
            path.unlink()
            found.append(refusal)
            peaks = ", ".join(f"{kind} {peak} MB" for kind, peak in sorted(refusal.peak_mb.items()))
            print(f"{name} | {refusal.file_bytes} bytes | {refusal.command} | {refusal.seconds:.1f} s | {peaks}")
            print(f"  {refusal.said}", flush=True)
    if given.save:
        given.save.write_text(json.dumps({**provenance(["pyarrow"]), "refusals": list(map(asdict, found))}, indent=1))


if __name__ == "__main__":
    main()
