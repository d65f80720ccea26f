"""Runs the sections one after the other, each in a process of its own.

An error on a GPU spoils its process for good, and a kernel that hangs ends only with it. So a section that fails,
hangs or runs late costs itself alone: what it had saved stands in the results, and the next one starts afresh. Compiled
kernels are in one cache, which the first section fills.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import describe
from lorabatch.benchmarks.gpu.sections import VARIANT, Place, Scale, Section
from lorabatch.benchmarks.gpu.variants import ALLOCATOR, VARIANTS

# A section looks at its time between measurements: the one it is at may end, and the process may start and stop.
GRACE_S = 40.0


def run_all(
    sections: Sequence[Section],
    model: str,
    scale_arguments: Sequence[str],
    device: torch.device,
    seconds: float,
    write: Callable[[Any], None],
    grace_s: float = GRACE_S,
    folder: Path | None = None,
    earlier: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Sections as one JSON object, written whenever one has ended, and `left_out`: by section, the names of what it
    had no time for. `grace_s`: what each may take beyond. `folder`: where each keeps what it has found so far, and its
    other files, should this process be ended. `earlier`: results of a run whose sections are not repeated where they
    are complete.
    """
    start, deadline = time.monotonic(), Deadline.after(seconds)
    result: dict[str, Any] = {"benchmark": "gpu", "model": model, "machine": describe(device)}
    # what is not asked for stays as it was
    result = dict(earlier) | result
    result |= {name: dict(earlier.get(name, {})) for name in ("seconds", "left_out")}
    with tempfile.TemporaryDirectory() as temporary:
        environment = _environment(temporary)
        place = folder or Path(temporary)
        for section in sections:
            if is_complete(section.name, earlier):
                continue
            began = time.monotonic()
            # the shares are a GPU's; in the interpreter durations mean nothing
            left = deadline.within(section.seconds if device.type == "cuda" else seconds).left_s
            print(f"{section.name} (at most {left:.0f} s)", file=sys.stderr, flush=True)
            found, late = _measured(section.name, left, scale_arguments, grace_s, place, environment)
            if section.name == "probe" and "failed" in str(found) and left > 0:
                environment |= dict.fromkeys(ALLOCATOR, "expandable_segments:False")
                found, late = _measured(section.name, left, scale_arguments, grace_s, place, environment)
            result[section.name] = found
            result["left_out"].pop(section.name, None)
            result["left_out"] |= {section.name: late} if late else {}
            result["seconds"][section.name] = round(time.monotonic() - began, 1)
            result["total_seconds"] = round(time.monotonic() - start, 1)
            write(result)
    return result


def is_complete(name: str, earlier: Mapping[str, Any]) -> bool:
    """Whether a run's results have all of a section."""
    found = earlier.get(name)
    is_cut = isinstance(found, dict) and bool(found.keys() & {"failed", "skipped"})
    return found is not None and not is_cut and not earlier["left_out"].get(name)


def _measured(
    name: str, left: float, arguments: Sequence[str], grace_s: float, folder: Path, environment: dict[str, str]
) -> tuple[Any, list[str]]:
    """Runs a section for at most `left` seconds. Returns its results, and the names of what it had no time for."""
    if left <= 0:
        return {"skipped": "no time left"}, []
    return _in_a_process(name, left, arguments, grace_s, folder, environment)


def run_variants(
    names: Sequence[str],
    model: str,
    scale_arguments: Sequence[str],
    device: torch.device,
    seconds: float,
    write: Callable[[Any], None],
    grace_s: float = GRACE_S,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Runs the section `VARIANT` under each of the named variants. Returns one JSON object, which is written whenever a
    variant has ended."""
    deadline = Deadline.after(seconds)
    result: dict[str, Any] = {"benchmark": "gpu variants", "model": model, "machine": describe(device)}
    result |= {"variants": {}, "left_out": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            left = deadline.within(VARIANT.seconds if device.type == "cuda" else seconds).left_s
            print(f"{name} (at most {left:.0f} s)", file=sys.stderr, flush=True)
            place = (folder or Path(temporary)) / name
            place.mkdir(parents=True, exist_ok=True)
            environment = _environment(temporary) | dict(VARIANTS[name])
            found, late = _measured(VARIANT.name, left, scale_arguments, grace_s, place, environment)
            result["variants"][name] = found
            result["left_out"] |= {name: late} if late else {}
            write(result)
    return result


def _environment(temporary: str) -> dict[str, str]:
    """Environment of the sections' processes: one cache of compiled kernels, memory as engines ask for it, and no
    copies of weights for engines on CPUs, which serve once. Variables that are set already win."""
    usual = {"TRITON_CACHE_DIR": str(Path(temporary, "triton")), "LORABATCH_WEIGHT_CACHE": "off"}
    usual |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    return usual | os.environ


def run_one(section: Section, scale: Scale, device: torch.device, seconds: float, path: Path) -> None:
    """One section in this process: `path` holds what it has found and left out so far, at any time."""
    deadline = Deadline.after(seconds)
    found: dict[str, Any] = {"left_out": deadline.left_out}

    def save(value: Any) -> None:
        found["value"] = value
        _write_whole(path, found)

    try:
        with torch.inference_mode():
            save(section.measure(scale, Place(device, deadline, save, path.parent)))
    except Exception as error:
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}"
        _write_whole(path, found)


def _in_a_process(
    name: str, seconds: float, arguments: Sequence[str], grace_s: float, folder: Path, environment: dict[str, str]
) -> tuple[Any, list[str]]:
    """Runs a section in a process of its own. Returns its results, and the names of what it had no time for."""
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", __package__ or "", "--only", name, "--json", str(path)]
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds), *arguments],
            timeout=seconds + grace_s,
            check=False,
            env=environment,
        )
        failed = None if done.returncode == 0 else f"its process ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        failed = f"ended after {seconds + grace_s:.0f} s"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    failed = found.get("failed", failed)
    value = found.get("value")
    return value if failed is None else {"failed": failed, "until_then": value}, found.get("left_out", [])


def _write_whole(path: Path, value: Any) -> None:
    """Never half a file, whenever the process ends."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value), encoding="utf-8")
    beside.replace(path)
