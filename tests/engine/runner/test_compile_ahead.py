"""Kernels that are compiled before the first step, by real compilers; a driver that only names it stands for a GPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.runner import backend
from lorabatch.engine.runner.backend import GpuBackend
from lorabatch.engine.runner.compile_ahead import EngineKernels, result_of, start_compiling, wait_until_compiled

LONG_CONTEXT = {"max_position_embeddings": 1024}
# Each launches other code: biases; norms of heads; windows, softcaps and norms behind layers; no rotation, no gate.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 32},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def run_steps(what: str, model: Path, **settings: Any) -> dict[str, list[str]]:
    """What `steps_without_gpu` prints."""
    settings = {"model_folder": str(model), "capability": 90, **settings}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "steps_without_gpu.py", what, json.dumps(settings)],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"dtype": "bfloat16"}),
        *(
            pytest.param(family, settings, marks=pytest.mark.long)
            for family, settings in [
                ("llama", {"dtype": "bfloat16", "base_quantization": "fp8"}),
                ("qwen2", {"dtype": "bfloat16", "capability": 80}),
                ("llama", {"dtype": "bfloat16", "mode": "exact"}),
                ("qwen3", {"dtype": "float16", "mode": "exact"}),
                ("gemma2", {"dtype": "float32", "capability": 100}),
                ("opt", {"dtype": "bfloat16"}),
            ]
        ),
    ],
)
def test_steps_launch_no_kernel_that_is_not_compiled_ahead(
    make_model: Callable[..., Path], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Prompts, decode rows, LoRA, long contexts, draws, merges: by what Triton would compile, argument by argument."""
    model = make_model(tmp_path / "model", family, **LONG_CONTEXT, **FAMILIES[family])
    found = run_steps("note", model, **settings)
    assert found["missing"] == []
    assert len(found["found"]) >= 12


def compiled(process: subprocess.Popen[bytes] | None) -> tuple[int, str]:
    assert process is not None
    return result_of(process, 600.0)


@pytest.mark.long
def test_steps_find_what_was_compiled_ahead_and_so_do_other_processes(
    make_model: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    model = make_model(tmp_path / "model", **LONG_CONTEXT)
    kernels = EngineKernels(str(model), "bfloat16", 90)
    # of two that start at a time one compiles, and the other waits for it
    first, other = map(compiled, [start_compiling(kernels), start_compiling(kernels)])
    assert (first[1], other[1]) == ("", "")
    assert min(first[0], other[0]) == 0
    programs = {path: path.stat().st_mtime_ns for path in cache.glob("*/*.cubin")}
    assert len(programs) == max(first[0], other[0]) >= 14
    found = run_steps("compile", model, dtype="bfloat16")
    assert found["missing"] == []
    assert len(found["found"]) >= 12
    assert start_compiling(kernels) is None, "a process was started though all is there"
    # each is found by itself, too
    kernels.done.unlink()
    assert compiled(start_compiling(kernels))[1] == ""
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*/*.cubin")} == programs


FAILING = """
import os, signal, sys, time
from pathlib import Path
from lorabatch.engine.runner.compile_process import compile_each

class Kernel:
    def __init__(self, name, preload):
        self.__name__, self.preload = name, preload

def dies(specialization):
    os.kill(os.getpid(), signal.SIGKILL)

def fails(specialization):
    raise RuntimeError(specialization)

def works(specialization):
    Path(specialization).touch()

made = Path(sys.argv[1])
kernels = {"a": dies, "b": fails, "c": works, "d": works, "e": works}
noted = {name: (Kernel(name, preload), str(made / name)) for name, preload in kernels.items()}
print(sorted(compile_each(noted, 2)), sorted(path.name for path in made.iterdir()))
"""


@pytest.mark.long
def test_a_process_that_dies_or_fails_costs_its_kernel_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, tmp_path], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.stdout.strip() == "['a: killed by signal 9', 'b: see the error above'] ['c', 'd', 'e']", done.stderr
    assert f"RuntimeError: {tmp_path / 'b'}" in done.stderr


@pytest.mark.parametrize(
    ("folder", "dtype", "problem"),
    [
        ("nowhere", "bfloat16", "No such file"),
        ("model", "float5", "the process that compiles them ended with code 1"),
    ],
)
def test_what_goes_wrong_is_a_warning(
    tiny_llama: Path, cache: Path, caplog: pytest.LogCaptureFixture, folder: str, dtype: str, problem: str
) -> None:
    model = tiny_llama if folder == "model" else tiny_llama / folder
    with caplog.at_level(logging.WARNING):
        process = start_compiling(EngineKernels(str(model), dtype, 90))
        if process is not None:
            wait_until_compiled(process)
    assert len(caplog.records) == 1
    assert problem in caplog.text


def test_compiling_that_takes_too_long_is_given_up(
    tiny_llama: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = start_compiling(EngineKernels(str(tiny_llama), "bfloat16", 90))
    assert process is not None
    wait_until_compiled(process, longest_s=0.1)
    assert "(compiling took longer than 0 s)" in caplog.text
    assert process.returncode == -9


def test_what_code_depends_on_has_a_file_of_its_own(
    tiny_llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = EngineKernels(str(tiny_llama), "bfloat16", 90)
    done = kernels.done
    assert (done.parent, kernels.done) == (cache, done)
    model = str(tiny_llama)
    others = [
        EngineKernels(model, "bfloat16", 80),
        EngineKernels(model, "float16", 90),
        EngineKernels(model, "bfloat16", 90, is_exact=True),
    ]
    assert len({done, *(other.done for other in others)}) == 4
    monkeypatch.setenv("LORABATCH_PDL", "1")
    assert kernels.done != done


@pytest.mark.parametrize(
    ("device", "member", "is_on", "expected"),
    [
        ("cuda", None, True, 1),
        ("cuda", 0, True, 2),
        ("cuda", 1, True, None),  # the leader does
        ("cuda", None, False, None),
        ("cpu", None, True, None),  # Triton's interpreter
    ],
)
def test_engines_on_gpus_compile_ahead(
    monkeypatch: pytest.MonkeyPatch, device: str, member: int | None, is_on: bool, expected: int | None
) -> None:
    monkeypatch.setattr(backend, "start_compiling", lambda kernels: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if not is_on:
        monkeypatch.setenv("LORABATCH_COMPILE_AHEAD", "0")
    partition = None if member is None else SimpleNamespace(member=member, num_members=2)
    here: Any = SimpleNamespace(
        device=torch.device(device), dtype=torch.bfloat16, config=EngineConfig(page_tokens=32), _partition=partition
    )
    kernels: Any = GpuBackend.compile_ahead(here, Path("model"))
    if expected is None:
        assert kernels is None
    else:
        assert kernels == EngineKernels(str(Path.cwd() / "model"), "bfloat16", 90, 32, "none", expected)
