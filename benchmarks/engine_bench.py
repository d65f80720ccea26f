"""`lorabatch bench engine`: our engine beside its peers on the same rows, in one run.

Systems take turns, each run in a process of its own, so that a machine that slows down slows all of them. Results go to
a JSON file with machine, versions, commit and date; `runs_path` keeps every run, so that repeats may be measured one
call at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from .engine_result import CEILING, MERGED, MERGED_ONE, NO_LORA, UNMERGED, Run, as_json, tables
from .engine_workload import EngineWorkload, make_workload
from .provenance import provenance

PEERS = {"peft": ("PEFT merged", "PEFT mixed"), "vllm": ("vLLM",)}
_PACKAGES = ("torch", "transformers", "peft", "vllm", "numpy")


def main(
    model: Path | None = None,
    vs: tuple[str, ...] = ("peft",),
    num_rows: int = 64,
    num_adapters: int = 8,
    repeats: int = 3,
    result_path: Path | None = None,
    runs_path: Path | None = None,
) -> dict[str, Any]:
    """Run the benchmark, print its tables and return (and optionally save) the result.

    `model`: a model folder; None takes the demo's base. `runs_path`: runs of earlier calls with the same arguments and
    commit, to which these are added. Raises ValueError for an unknown peer, or runs of another commit or workload.
    """
    unknown = sorted(set(vs) - PEERS.keys())
    if unknown:
        raise ValueError(f"--vs {', '.join(unknown)}: unknown peer. Known: {', '.join(PEERS)}.")
    missing = {peer for peer in vs if find_spec(peer) is None}
    not_run = {system: f"{peer} cannot be imported here" for peer in missing for system in PEERS[peer]}
    peers = [system for peer in vs if peer not in missing for system in PEERS[peer]]
    systems = [NO_LORA, UNMERGED, MERGED_ONE, MERGED, *peers, CEILING]
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(model or _demo_base(), Path(scratch), num_rows, num_adapters)
        path = Path(scratch) / "workload.json"
        workload.write(path)
        facts = provenance(_PACKAGES) | {"model": Path(workload.model).name}
        runs = _earlier_runs(runs_path, facts, workload)
        for repeat in range(repeats):
            _take_turns(systems, path, runs, f"{repeat + 1}/{repeats}")
    if runs_path is not None:
        kept = {name: [asdict(run) for run in many] for name, many in runs.items()}
        runs_path.write_text(json.dumps({"of": _same(facts, workload), "runs": kept}), encoding="utf-8")
    result = {"benchmark": "engine"} | facts | as_json(workload, runs, not_run)
    for table in tables(result):
        Console().print(table)
    if result_path is not None:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _demo_base() -> Path:
    from ..demo.base_model import base_model_folder

    return base_model_folder()


def _same(facts: dict[str, Any], workload: EngineWorkload) -> dict[str, Any]:
    """What runs must share to be one measurement."""
    shared = {name: facts[name] for name in ("commit", "machine", "versions", "model")}
    return shared | {"rows": len(workload.rows), "adapters": len(workload.adapters)}


def _earlier_runs(path: Path | None, facts: dict[str, Any], workload: EngineWorkload) -> dict[str, list[Run]]:
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["of"] != _same(facts, workload):
        raise ValueError(f"{path}: holds runs of another commit, machine or workload. Remove it, or name another file.")
    return {name: [Run(**run) for run in many] for name, many in kept["runs"].items()}


def _take_turns(systems: Sequence[str], workload_path: Path, runs: dict[str, list[Run]], repeat: str) -> None:
    console = Console(stderr=True)
    for system in systems:
        run = _run_once(system, workload_path)
        console.print(f"run {repeat}  {system}: {run.seconds:.1f} s")
        runs.setdefault(system, []).append(run)


def _run_once(system: str, workload_path: Path) -> Run:
    command = [sys.executable, "-m", f"{__package__}.engine_systems", system, str(workload_path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{system} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))
