"""How much memory engines on CPUs take, beside what `lorabatch plan` says they take at most.

python -m lorabatch.benchmarks.engine.memory [--save FILE]

Runs `lorabatch run` as a user does, on the demo's base model, adapters and prompts, with a pool small enough to be
full, and reads the highest resident memory of the engine's processes. Fails where that is more than a tenth from the
plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

import lorabatch
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.jobs.errors import JobRequestError

_NUM_ROWS = 96
_MOST_APART = 0.1
_POLL_S = 0.02
_COMMON = {"max_tokens": 60, "mode": "unmerged", "workers": 1, "pool_bytes": 200_000_000}
#: Name of a case -> its options beside the common ones.
CASES: Mapping[str, Mapping[str, Any]] = {
    "unmerged": {},
    "merged": {"mode": "merged"},
    "exact": {"mode": "exact"},
    "larger pool": {"pool_bytes": 300_000_000},
    "longer steps": {"step_tokens": 2048},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"base_quantization": "int8"},
    "two processes": {"tensor_parallel": 2},
}


def measured_bytes(options: Mapping[str, Any]) -> int:
    """Run the job; the highest resident memory of the processes of its engine together. Files that several have mapped
    count once.

    Raises `RuntimeError` where the run fails.
    """
    command = [sys.executable, "-m", "lorabatch", "run"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    parent, most = psutil.Process(run.pid), 0
    while run.poll() is None:
        anonymous, files = 0, 0
        with suppress(psutil.Error, OSError):
            for process in parent.children(recursive=True):
                if any(".engine." in word for word in process.cmdline()):
                    found = _status(process.pid)
                    anonymous += found.get("RssAnon", 0) + found.get("RssShmem", 0)
                    files = max(files, found.get("RssFile", 0))
            most = max(most, anonymous + files)
        time.sleep(_POLL_S)
    assert run.stderr is not None
    if run.returncode:
        raise RuntimeError(run.stderr.read().splitlines()[-1])
    return most


def _status(pid: int) -> dict[str, int]:
    """Kind of memory of a process -> bytes; nothing of one that has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0].startswith("Rss")}


def measure(case: Mapping[str, Any], input_path: Path) -> dict[str, Any]:
    """Planned and measured bytes of one case, and the share of the plan that was taken."""
    options = {
        "model": str(base_model_folder()),
        "adapters": str(DEMO_FOLDER / "adapters"),
        "input": str(input_path),
        **_COMMON,
        **case,
    }
    planned = lorabatch.plan(**options).details.memory
    if planned is None:
        raise RuntimeError("the engines would run on a GPU")
    most = planned.unmerged + (planned.merged if options["mode"] == "merged" else 0)
    with tempfile.TemporaryDirectory() as folder:
        found = measured_bytes(options | {"output": folder})
    return {"planned": asdict(planned), "planned_bytes": most, "measured_bytes": found, "measured_share": found / most}


def main() -> int:
    """Measure all cases, print and save them; 1 where a plan is more than a tenth from what was measured."""
    parser = argparse.ArgumentParser(prog="lorabatch.benchmarks.engine.memory", description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        input_path = Path(scratch) / "prompts.parquet"
        pq.write_table(pq.read_table(DEMO_FOLDER / "prompts.parquet").slice(0, _NUM_ROWS), input_path)
        for name in args.cases or CASES:
            try:
                found[name] = measure(CASES[name], input_path)
            except (JobRequestError, RuntimeError) as error:
                found[name] = {"not_run": str(error)}
            print(name, json.dumps(found[name]), flush=True)
    result = provenance(("torch",)) | {"benchmark": "engine memory", "rows": _NUM_ROWS, "cases": found}
    if args.save is not None:
        args.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shares = [case["measured_share"] for case in found.values() if "measured_share" in case]
    return int(any(abs(share - 1) > _MOST_APART for share in shares))


if __name__ == "__main__":
    sys.exit(main())
