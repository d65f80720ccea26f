"""`python -m lorabatch.benchmarks.gpu [--model NAME] [--json FILE]`: right first, then how fast, in ten minutes.

Needs a GPU and no more than torch, triton, numpy, safetensors and tokenizers; transformers, peft and vllm are measured
beside it where they are installed. Exits with 1 when something is wrong. Results are written after each section, so a
run that is cut short leaves what it has. `--tiny` runs all of it on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.gpu.device import describe, warnings_about
from lorabatch.benchmarks.gpu.faster_interpreter import hasten
from lorabatch.benchmarks.gpu.report import as_table, problems_of
from lorabatch.benchmarks.gpu.run import run_all, run_one, run_variants
from lorabatch.benchmarks.gpu.sections import SECTIONS, VARIANT, full_scale, tiny_scale
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B, MODELS, TINY
from lorabatch.benchmarks.gpu.variants import VARIANTS, variants_table

_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.gpu", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default=LLAMA_3_8B.name)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--seconds", type=float, default=530.0, help="when to stop measuring (default: 530)")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes on a CPU: shows that it runs, not how fast")
    names = [section.name for section in (*SECTIONS, VARIANT)]
    parser.add_argument("--only", choices=names, help="one section, in this process")
    parser.add_argument(
        "--variants",
        nargs="*",
        metavar="NAME",
        help=f"a few numbers under each of these ways to launch, all unless named: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--sections", nargs="+", choices=names[:-1], metavar="NAME", help="these alone, one by one")
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json has of complete sections")
    options = parser.parse_args(arguments)
    # in the root of a checkout, transformers would take our folder `kernels` for Hugging Face's package
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _ROOT]
    problem = _cannot_run(options.tiny)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if options.tiny:
        hasten()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", torch.cuda.current_device())
    if options.only:
        scale = tiny_scale() if options.tiny else full_scale(MODELS[options.model])
        (section,) = (section for section in (*SECTIONS, VARIANT) if section.name == options.only)
        run_one(section, scale, device, options.seconds, options.json or Path(f"{options.only}.json"))
        return 0
    for warning in warnings_about(device, describe(device)):
        print(f"warning: {warning}", file=sys.stderr)
    model = TINY.name if options.tiny else options.model
    scale_arguments = ["--tiny"] if options.tiny else ["--model", options.model]
    folder = None
    if options.json is not None:
        folder = options.json.with_suffix("")  # of what sections have found so far, and of traces
        folder.mkdir(parents=True, exist_ok=True)
    write = partial(_write, options.json)
    if options.variants is not None:
        return _variants(options.variants or list(VARIANTS), model, scale_arguments, device, options, folder, write)
    earlier = _earlier(options.json, model, device) if options.resume else {}
    chosen = [section for section in SECTIONS if section.name in (options.sections or names)]
    result = run_all(chosen, model, scale_arguments, device, options.seconds, write, folder=folder, earlier=earlier)
    print(as_table(result))
    for wrong in problems_of(result):
        print(f"wrong: {wrong}", file=sys.stderr)
    for name in result["left_out"].get("problems", []):
        print(f"not checked: {name}", file=sys.stderr)
    return 1 if problems_of(result) or "problems" in result["left_out"] else 0


def _earlier(path: Path | None, model: str, device: torch.device) -> dict[str, Any]:
    """Results that `--resume` keeps: of the same model, device and commit."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    asked = {"model": model, **{name: describe(device)[name] for name in ("device", "commit")}}
    kept = {"model": found["model"], **{name: found["machine"][name] for name in ("device", "commit")}}
    if asked != kept:
        sys.exit(f"--resume: {path} was measured with {kept}, expected {asked}. Name another file with --json.")
    return found


def _variants(
    names: list[str],
    model: str,
    scale_arguments: list[str],
    device: torch.device,
    options: argparse.Namespace,
    folder: Path | None,
    write: Callable[[dict[str, object]], None],
) -> int:
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        print(f"--variants {unknown[0]}: expected {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    result = run_variants(names, model, scale_arguments, device, options.seconds, write, folder=folder)
    print(variants_table(result))
    return 0


def _cannot_run(is_tiny: bool) -> str | None:
    if is_tiny:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if is_interpreted else "--tiny runs in Triton's interpreter: set TRITON_INTERPRET=1"
    if not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false. Run this where one is, or try --tiny."
    return None


def _write(path: Path | None, result: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
