"""Every operator has a plain twin: a `reference.py` of at most 50 lines that a test compares the back ends with."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lorabatch import kernels

ROOM = Path(next(iter(kernels.__path__)))
# Folders that operators share: layouts of a step, and the loading of compiled kernels.
NO_OPERATORS = {"layouts", "native"}
OPERATORS = sorted({path.parent.name for path in ROOM.glob("*/__init__.py")} - NO_OPERATORS)


def imported_by_tests() -> set[str]:
    """Modules and names that the tests of this folder import."""
    trees = [ast.parse(test.read_text(encoding="utf-8")) for test in Path(__file__).parent.glob("test_*.py")]
    froms = [node for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_has_a_short_plain_twin(operator: str) -> None:
    reference = ROOM / operator / "reference.py"
    assert reference.exists()
    assert len(reference.read_text(encoding="utf-8").splitlines()) <= 50


def test_each_plain_twin_is_compared_by_a_test() -> None:
    imported = imported_by_tests()
    twins = [f"lorabatch.kernels.{operator}.reference" for operator in OPERATORS]
    assert [twin for twin in twins if not any(name.startswith(twin) for name in imported)] == []
