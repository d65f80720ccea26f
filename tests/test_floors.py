"""Imports point down, and light rooms stay light: checked in fresh interpreters, where no other test has imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# What a room must not load, and its modules that are imported one after another in one interpreter.
LIGHT = {"torch", "triton", "dask", "distributed", "pyarrow", "transformers", "typer", "pandas", "bokeh"}
ROOMS = {
    "system": (LIGHT | {"numpy"}, tuple(f"lorabatch.system.{name}" for name in ("untrusted", "confinement", "codec"))),
    "plain": (
        LIGHT,
        (
            "lorabatch",
            "lorabatch.scheduler.scheduler",
            "lorabatch.scheduler.planning.waves",
            "lorabatch.engine",
            "lorabatch.engine.config",
            "lorabatch.engine.request",
            "lorabatch.engine.peft",
            "lorabatch.engine.text.tokenizer",
        ),
    ),
    "jobs": (LIGHT - {"pyarrow", "pandas"}, ("lorabatch.jobs.spec", "lorabatch.jobs.store")),
    "tensors": (
        {"dask", "distributed", "pyarrow", "transformers", "typer"},
        ("lorabatch.kernels.segment_lora", "lorabatch.engine.engine"),
    ),
    "pipeline": (
        {"torch", "triton", "pandas", "bokeh", "transformers", "typer"},
        ("lorabatch.pipeline.run", "lorabatch.pipeline.worker.run_shard", "lorabatch.pipeline.submit"),
    ),
    "cli": (LIGHT - {"typer"}, ("lorabatch.cli",)),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_does_not_load_what_it_must_not(room: str) -> None:
    forbidden, modules = ROOMS[room]
    code = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
    print(json.dumps([name, sorted({{module.partition(".")[0] for module in sys.modules}})]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module, loaded in map(json.loads, done.stdout.splitlines()):
        assert forbidden.isdisjoint(loaded), f"{module} loads {forbidden.intersection(loaded)}"


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
    rooms = ("benchmarks", "console", "demo", "engine", "jobs", "kernels", "pipeline", "scheduler", "system")
    folders = [path.parent for room in rooms for path in (root / room).rglob("__init__.py")]
    found = {"lorabatch"} | {".".join(("lorabatch", *folder.relative_to(root).parts)) for folder in folders}
    assert listed == found
