"""Everything that must be right before a speed means anything, each by itself: one that fails hides no other."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch

from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.correctness import check_all, check_fp8
from lorabatch.benchmarks.gpu.engine_checks import (
    DEEP,
    WIDE,
    check_ahead,
    check_engine,
    check_exact,
    check_graphs,
    check_launches,
    check_real_widths,
    one_layer,
)
from lorabatch.benchmarks.gpu.shapes import TINY, ModelShape


def run_checks(
    dtypes: list[torch.dtype],
    max_tokens: int,
    shape: ModelShape,
    device: torch.device,
    deadline: Deadline,
    save: Callable[[list[str]], None],
) -> list[str]:
    """Runs all checks until the deadline. Returns what is wrong, as sentences: none when all is right. The deadline's
    `left_out` names the checks that it has cut off."""
    checks: list[tuple[str, Callable[[], list[str]]]] = [
        (f"kernels in {dtype}", lambda dtype=dtype: check_all([dtype], device))  # type: ignore[misc]
        for dtype in dtypes
    ]
    engine = [
        ("engine beside the CPU path", lambda: check_engine(device, max_tokens)),
        ("graphs", lambda: check_graphs(device, max_tokens)),
        ("launches", lambda: check_launches(device)),
        ("a layer of real widths", lambda: check_real_widths(device, one_layer(shape), dtypes[0])),
        ("one step ahead", lambda: check_ahead(device, max_tokens)),
        ("products in 8 bits", lambda: check_fp8(device)),
        ("mode exact", lambda: check_exact(device, max_tokens)),
        ("mode exact, wide", lambda: check_exact(device, max_tokens, WIDE if device.type == "cuda" else TINY)),
        ("a deep model", lambda: check_real_widths(device, DEEP if device.type == "cuda" else TINY, torch.float32)),
    ]
    checks[1:1] = engine
    problems: list[str] = []
    for name, check in checks:
        if not deadline.allows(name):
            continue
        began_s = time.perf_counter()
        problems += _found(name, check)
        print(f"{name}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
        save(problems)
    return problems


def _found(name: str, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:
        traceback.print_exc()
        return [f"{name} failed: {type(error).__name__}: {error}"]
