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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorabatch.benchmarks.engine.result import (
    CEILING,
    FORMATS,
    LLAMA_CPP,
    LLAMA_CPP_NO_LORA,
    MERGED,
    MERGED_ONE,
    NO_LORA,
    OPENVINO,
    OPENVINO_FUSED,
    OPENVINO_NO_LORA,
    PRODUCTS,
    TORCH_CEILING,
    UNMERGED,
    Run,
    as_json,
    in_format,
    tables,
)
from lorabatch.benchmarks.engine.workload import ALL_LENGTHS, ALL_PROMPTS, Lengths, make_workload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.console.terminal import plain_console
from lorabatch.kernels.packed_weight import can_multiply


def _in_all_formats(*systems: str) -> tuple[str, ...]:
    """Whatever the processor has no instructions for, these compute all the same."""
    return tuple(in_format(system, products) for products in PRODUCTS for system in systems)


PEERS = {
    "peft": ("PEFT merged", "PEFT mixed"),
    "vllm": ("vLLM",),
    "llamacpp": _in_all_formats(LLAMA_CPP_NO_LORA, LLAMA_CPP),
    "openvino": _in_all_formats(OPENVINO_NO_LORA, OPENVINO),
}
# OpenVINO keeps keys and values in bf16 only on a processor with instructions for bf16.
_NO_INSTRUCTIONS = "this processor has no instructions for it"
_OPENVINO_BF16 = [in_format(system, "bfloat16") for system in (OPENVINO_NO_LORA, OPENVINO, OPENVINO_FUSED)]
# Peer -> its Python package, where the names differ.
_MODULES = {"llamacpp": "xllamacpp", "openvino": "openvino_genai"}
_INSTALL = {
    "peft": ": pip install peft transformers",
    "llamacpp": ": pip install xllamacpp",
    "openvino": ": pip install openvino-genai",
}
_PACKAGES = ("torch", "transformers", "peft", "vllm", "xllamacpp", "openvino_genai", "numpy")


def main(
    model: Path | None = None,
    vs: tuple[str, ...] = ("peft",),
    num_rows: int = 64,
    num_adapters: int = 8,
    repeats: int = 3,
    result_path: Path | None = None,
    runs_path: Path | None = None,
    lengths: tuple[str, ...] = ALL_LENGTHS,
    prompts: str = "short",
) -> dict[str, Any]:
    """Run the benchmark, print its tables and return (and optionally save) the result.

    `model`: a model folder; None takes the demo's base. `runs_path`: runs of earlier calls with the same arguments and
    commit, to which these are added. `lengths`: of answers, one workload for each. `prompts`: short, or long ones with
    short answers. Raises ValueError for an unknown peer or kind of lengths or prompts, or runs of another commit or
    workload.
    """
    unknown = sorted(set(vs) - PEERS.keys())
    if unknown:
        raise ValueError(f"--vs {', '.join(unknown)}: unknown peer. Known: {', '.join(PEERS)}, or none.")
    kinds = [kind for kind in ALL_LENGTHS if kind in lengths]
    if len(kinds) < len(set(lengths)):
        raise ValueError(f"--lengths {', '.join(lengths)}: expected {' or '.join(ALL_LENGTHS)}.")
    of_prompts = next((kind for kind in ALL_PROMPTS if kind == prompts), None)
    if of_prompts is None:
        raise ValueError(f"--prompts {prompts}: expected {' or '.join(ALL_PROMPTS)}.")
    missing = {peer for peer in vs if not _is_installed(peer)}
    not_run = {s: f"{peer} is not installed{_INSTALL.get(peer, '')}" for peer in missing for s in PEERS[peer]}
    if "openvino" in vs and not can_multiply("bfloat16"):
        not_run |= dict.fromkeys(_OPENVINO_BF16, _NO_INSTRUCTIONS)
    if "openvino" in vs and num_adapters == 1:
        not_run[in_format(OPENVINO_FUSED, "int8")] = "it fuses adapters into weights of 16 and 32 bits only"
    not_run |= {products: _NO_INSTRUCTIONS for products in FORMATS if not can_multiply(products)}
    peers = tuple(peer for peer in vs if peer not in missing)
    systems = [system for system in _systems(peers, num_adapters) if system not in not_run]
    model = model or _demo_base()
    facts = provenance(_PACKAGES) | {"model": model.name}
    same = {name: facts[name] for name in ("commit", "machine", "versions", "model")}
    same |= {"rows": num_rows, "adapters": num_adapters, "prompts": prompts}
    runs = _earlier_runs(runs_path, same)
    of_workload = {}
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        for kind in kinds:
            workload = make_workload(model, Path(scratch), num_rows, num_adapters, kind, of_prompts)
            path = Path(scratch) / "workload.json"
            workload.write(path)
            for repeat in range(repeats):
                _take_turns(systems, path, runs[kind], f"{kind} {repeat + 1}/{repeats}")
                _keep_runs(runs_path, same, runs)
            of_workload[kind] = as_json(workload, runs[kind], not_run)
    result = {"benchmark": "engine"} | facts | {"workloads": of_workload}
    for kind, of in of_workload.items():
        for table in tables(kind, of):
            plain_console().print(table)
    if result_path is not None:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _systems(peers: Sequence[str], num_adapters: int) -> list[str]:
    """In an order in which what is compared closely runs close together: the machine's speed changes from minute to
    minute. One adapter may be merged for good, but into no base in 8 bits."""
    formats = [products for products in FORMATS if can_multiply(products)]
    in_formats = [in_format(system, products) for products in formats for system in (NO_LORA, UNMERGED)]
    of_peers = [system for peer in peers for system in PEERS[peer]]
    if num_adapters > 1:
        return [MERGED_ONE, NO_LORA, UNMERGED, *in_formats, CEILING, TORCH_CEILING, MERGED, *of_peers]
    merged = [in_format(MERGED, products) for products in formats if products != "int8"]
    if "openvino" in peers:
        of_peers += _in_all_formats(OPENVINO_FUSED)
    return [NO_LORA, MERGED, UNMERGED, *in_formats, *merged, *of_peers]


def peers_of(vs: Sequence[str] | None) -> tuple[str, ...]:
    """The peers that `--vs` names; without it those that are installed, and none for `none`."""
    if vs is None:
        return tuple(peer for peer in PEERS if _is_installed(peer))
    return () if list(vs) == ["none"] else tuple(vs)


def _is_installed(peer: str) -> bool:
    return find_spec(_MODULES.get(peer, peer)) is not None


def _demo_base() -> Path:
    from lorabatch.demo.base_model import base_model_folder

    return base_model_folder()


def _earlier_runs(path: Path | None, same: dict[str, Any]) -> dict[Lengths, dict[str, list[Run]]]:
    """Runs by lengths and system. `same`: what runs must share to be one measurement."""
    runs: dict[Lengths, dict[str, list[Run]]] = {kind: {} for kind in ALL_LENGTHS}
    if path is None or not path.exists():
        return runs
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["of"] != same:
        raise ValueError(f"{path}: holds runs of another commit, machine or workload. Remove it, or name another file.")
    return {kind: {name: [Run(**run) for run in many] for name, many in kept["runs"][kind].items()} for kind in runs}


def _keep_runs(path: Path | None, same: dict[str, Any], runs: Mapping[Lengths, Mapping[str, Sequence[Run]]]) -> None:
    if path is not None:
        kept = {k: {name: [asdict(run) for run in many] for name, many in of.items()} for k, of in runs.items()}
        path.write_text(json.dumps({"of": same, "runs": kept}), encoding="utf-8")


def _take_turns(systems: Sequence[str], workload_path: Path, runs: dict[str, list[Run]], repeat: str) -> None:
    console = plain_console(stderr=True)
    for system in systems:
        run = _run_once(system, workload_path)
        console.print(f"run {repeat}  {system}: {run.seconds:.1f} s")
        runs.setdefault(system, []).append(run)


def _run_once(system: str, workload_path: Path) -> Run:
    command = [sys.executable, "-m", f"{__package__}.systems", system, str(workload_path)]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{system} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))
