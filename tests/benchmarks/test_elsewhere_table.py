"""The table of the same tasks with other systems is what the script counts, and its programs can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import lorabatch
from lorabatch.benchmarks.elsewhere_table import FOLDER, SYSTEMS, TASKS, effort, table

ROOT = Path(lorabatch.__file__).parent


def test_the_document_has_the_table_that_is_counted() -> None:
    assert table() in (ROOT / "docs" / "start" / "elsewhere.md").read_text("utf-8")


def test_each_task_has_a_program_for_each_system() -> None:
    assert {folder.name for folder in FOLDER.iterdir() if folder.is_dir()} == set(TASKS)
    for task in TASKS:
        for system in SYSTEMS:
            assert effort(task, system).num_lines > 1, (task, system)
        for program in (FOLDER / task).glob("*.py"):
            compile(program.read_text("utf-8"), str(program), "exec")


@pytest.mark.parametrize("task", TASKS)
def test_none_needs_fewer_lines_or_names(task: str) -> None:
    ours, others = effort(task, "lorabatch"), [effort(task, system) for system in SYSTEMS if system != "lorabatch"]
    assert ours.num_lines <= min(other.num_lines for other in others)
    assert ours.num_names <= min(other.num_names for other in others)


def test_programs_that_were_not_run_say_so() -> None:
    for task in TASKS:
        for system in SYSTEMS:
            texts = [path.read_text("utf-8") for path in (FOLDER / task).iterdir() if path.stem.startswith(system)]
            assert any("Not run." in text for text in texts) == (system != "lorabatch"), (task, system)
