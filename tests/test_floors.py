"""Imports point down, and light rooms stay light: checked in fresh interpreters, where no other test has imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("torch", "triton", "dask", "distributed", "pyarrow", "transformers", "typer", "pandas")
FORBIDDEN = {
    "lorabatch": HEAVY,
    "lorabatch.scheduler.scheduler": HEAVY,
    "lorabatch.scheduler.waves": HEAVY,
    "lorabatch.engine": HEAVY,
    "lorabatch.engine.config": HEAVY,
    "lorabatch.engine.request": HEAVY,
    "lorabatch.engine.peft": HEAVY,
    "lorabatch.engine.text.tokenizer": HEAVY,
    "lorabatch.engine.engine": ("dask", "distributed", "pyarrow", "transformers", "typer"),
    "lorabatch.jobs.spec": ("torch", "triton", "dask", "distributed", "transformers", "typer"),
    "lorabatch.jobs.store": ("torch", "triton", "dask", "distributed", "transformers", "typer"),
    "lorabatch.kernels.segment_lora": ("dask", "distributed", "pyarrow", "transformers"),
    "lorabatch.cli": ("torch", "triton", "dask", "distributed", "pyarrow", "transformers", "pandas"),
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_a_room_does_not_load_what_it_must_not(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(FORBIDDEN[module]), f"{module} loads {loaded & set(FORBIDDEN[module])}"


@pytest.mark.parametrize(
    "module", ["lorabatch.scheduler.scheduler", "lorabatch.engine.engine", "lorabatch.pipeline.coordinator.driver"]
)
def test_policies_of_papers_are_loaded_only_when_they_are_asked_for(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in json.loads(done.stdout) if name.startswith("lorabatch.scheduler.baselines")]
    assert loaded == []


def test_every_package_folder_is_listed_for_installation() -> None:
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    rooms = ("benchmarks", "console", "demo", "engine", "jobs", "kernels", "pipeline", "scheduler")
    folders = [path.parent for room in rooms for path in (root / room).rglob("__init__.py")]
    found = {"lorabatch"} | {".".join(("lorabatch", *folder.relative_to(root).parts)) for folder in folders}
    assert listed == found
