"""What the GPU benchmark compiles before it measures: by types, shapes and alignments, without a GPU or a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

Launches = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def found() -> Launches:
    """What `launches_of_sections` prints."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "launches_of_sections.py"],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    launches: Launches = json.loads(done.stdout)
    return launches


def kernels_of(names: list[str]) -> set[str]:
    return {name.split()[0].rpartition(".")[2] for name in names}


@pytest.mark.long
def test_sections_launch_no_kernel_that_is_not_compiled_before_them(found: Launches) -> None:
    """Checks, kernels alone, layers and merges."""
    assert found["sections"]["missing"] == []
    assert kernels_of(found["sections"]["launched"]) >= {
        "_shrink", "_qkv", "_add_residual", "_gate_up", "_attend", "_norm", "_merge", "_narrow", "_draw"
    }  # fmt: skip


@pytest.mark.long
def test_a_layer_by_itself_has_the_code_of_a_model_s(found: Launches) -> None:
    """Whatever the number of layers and however long block tables are."""
    assert found["layers"]["missing"] == []
    assert kernels_of(found["layers"]["launched"]) == {
        "_norm",
        "_shrink",
        "_qkv",
        "_attend",
        "_add_residual",
        "_gate_up",
    }
