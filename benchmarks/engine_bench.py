"""`lorabatch bench engine`: our engine beside transformers + PEFT on the same rows, in one run.

Systems take turns, each run in a process of its own, so that a machine that slows down slows all of them; medians and
ratios are reported. Results go to a JSON file with machine, versions, commit and date.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .engine_workload import EngineWorkload, make_workload

OURS = ("lorabatch no LoRA", "lorabatch unmerged", "lorabatch merged")
PEERS = {"peft": ("PEFT merged", "PEFT mixed")}
CEILING = "GEMM ceiling"
_PACKAGES = ("torch", "transformers", "peft", "numpy")


@dataclass(frozen=True, slots=True)
class SystemRuns:
    """All runs of one system: seconds each, peak resident bytes, and the tokens of the last run."""

    seconds: list[float]
    peak_bytes: int
    tokens: list[list[int]]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def main(
    model: Path | None = None,
    vs: tuple[str, ...] = ("peft",),
    num_rows: int = 64,
    num_adapters: int = 8,
    repeats: int = 3,
    result_path: Path | None = None,
) -> dict[str, Any]:
    """Run the benchmark, print its table and return (and optionally save) the result.

    `model`: a model folder; None takes the demo's base. Raises ValueError for an unknown peer.
    """
    unknown = sorted(set(vs) - PEERS.keys())
    if unknown:
        raise ValueError(f"--vs {', '.join(unknown)}: unknown peer. Known: {', '.join(PEERS)}.")
    systems = [*OURS, *(system for peer in vs for system in PEERS[peer]), CEILING]
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        workload = make_workload(model or _demo_base(), Path(scratch), num_rows, num_adapters)
        path = Path(scratch) / "workload.json"
        workload.write(path)
        runs = _take_turns(systems, path, repeats)
    result = _result(workload, runs, repeats)
    _print(result)
    if result_path is not None:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _demo_base() -> Path:
    from ..demo.base_model import base_model_folder

    return base_model_folder()


def _take_turns(systems: list[str], workload_path: Path, repeats: int) -> dict[str, SystemRuns]:
    console = Console(stderr=True)
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for repeat in range(repeats):
        for system in systems:
            run = _run_once(system, workload_path)
            console.print(f"run {repeat + 1}/{repeats}  {system}: {run['seconds']:.1f} s")
            runs[system].append(run)
    return {
        system: SystemRuns([r["seconds"] for r in many], max(r["peak_bytes"] for r in many), many[-1]["tokens"])
        for system, many in runs.items()
    }


def _run_once(system: str, workload_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"{__package__}.engine_systems", system, str(workload_path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{system} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


def _result(workload: EngineWorkload, runs: dict[str, SystemRuns], repeats: int) -> dict[str, Any]:
    reference = runs["lorabatch unmerged"]
    systems = {
        system: {
            "median_s": round(of.median_s, 3),
            "seconds": [round(s, 3) for s in of.seconds],
            "output_tokens_per_s": round(workload.output_tokens / of.median_s, 1),
            "unmerged_is_faster_by": round(of.median_s / reference.median_s, 3),
            "peak_bytes": of.peak_bytes,
            "rows_equal_to_unmerged": sum(a == b for a, b in zip(of.tokens, reference.tokens, strict=False)),
        }
        for system, of in runs.items()
    }
    return {
        "benchmark": "engine",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in _PACKAGES},
        "workload": {
            "model": Path(workload.model).name,
            "rows": len(workload.rows),
            "adapters": len(workload.adapters),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "repeats": repeats,
        "systems": systems,
    }


def _print(result: dict[str, Any]) -> None:
    w = result["workload"]
    table = Table(title=f"{w['rows']} rows, {w['adapters']} adapters, {w['output_tokens']} tokens out ({w['model']})")
    for column in ("system", "median s", "tokens/s", "unmerged is faster by", "peak GB", "rows equal"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, of in result["systems"].items():
        table.add_row(
            system,
            f"{of['median_s']:.2f}",
            f"{of['output_tokens_per_s']:.0f}",
            f"{of['unmerged_is_faster_by']:.2f}x",
            f"{of['peak_bytes'] / 1e9:.2f}",
            "" if system == CEILING else f"{of['rows_equal_to_unmerged']}/{w['rows']}",
        )
    Console().print(table)


def _commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
