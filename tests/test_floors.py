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
            "lorabatch.engine.text.tokenizers.tokenizer",
        ),
    ),
    "jobs": (LIGHT - {"pyarrow", "pandas"}, ("lorabatch.jobs.spec", "lorabatch.jobs.store")),
    "tensors": (
        {"dask", "distributed", "pyarrow", "transformers", "triton", "typer"},
        ("lorabatch.kernels.segment_lora", "lorabatch.engine.engine"),
    ),
    "pipeline": (
        {"torch", "triton", "pandas", "bokeh", "transformers", "typer"},
        (
            "lorabatch.pipeline.run",
            "lorabatch.pipeline.worker.run_shard",
            "lorabatch.pipeline.submit",
            "lorabatch.pipeline.coordinator.driver",
        ),
    ),
    "cli": (LIGHT - {"typer"}, ("lorabatch.cli",)),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_does_not_load_what_it_must_not(room: str) -> None:
    """No room loads policies of papers, which only a job that asks for one loads."""
    forbidden, modules = ROOMS[room]
    code = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
    loaded = {{module.partition(".")[0] for module in sys.modules}}
    policies = [module for module in sys.modules if module.startswith("lorabatch.scheduler.baselines")]
    print(json.dumps([name, sorted(loaded), policies]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module, loaded, policies in map(json.loads, done.stdout.splitlines()):
        assert forbidden.isdisjoint(loaded), f"{module} loads {forbidden.intersection(loaded)}"
        assert policies == [], f"{module} loads {policies}"


def test_every_package_folder_is_listed_for_installation() -> None:
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    rooms = ("benchmarks", "console", "demo", "engine", "jobs", "kernels", "pipeline", "scheduler", "system")
    folders = [path.parent for room in rooms for path in (root / room).rglob("__init__.py")]
    found = {"lorabatch"} | {".".join(("lorabatch", *folder.relative_to(root).parts)) for folder in folders}
    assert listed == found
