"""Which versions are refused, and what is said."""

from __future__ import annotations

import pytest

from lorabatch import __version__
from lorabatch.pipeline.cluster.versions import version_problem


def test_a_cluster_of_this_version_has_no_problem() -> None:
    assert version_problem(__version__, {"tcp://a": __version__}) == ""
    assert version_problem(__version__, {}) == ""


@pytest.mark.parametrize(
    ("scheduler", "workers", "found"),
    [
        (None, {"tcp://a": __version__}, "the scheduler has none."),
        ("0.0.9", {}, "the scheduler has 0.0.9."),
        (
            __version__,
            {"tcp://a": None, "tcp://b": __version__, "tcp://c": "0.0.9"},
            "2 of 3 workers have another or none (tcp://a has none, tcp://c has 0.0.9).",
        ),
        (None, {"tcp://a": None}, "the scheduler has none and 1 of 1 workers have another or none (tcp://a has none)."),
    ],
)
def test_the_sides_that_differ_are_named_with_what_to_do(
    scheduler: str | None, workers: dict[str, str | None], found: str
) -> None:
    expected = f"cluster: lorabatch {__version__} is expected on the scheduler and every worker; {found} Install "
    assert version_problem(scheduler, workers).startswith(expected)


def test_of_many_workers_some_are_shown() -> None:
    problem = version_problem(__version__, {f"tcp://w{i}": None for i in range(100)})
    assert "100 of 100 workers" in problem
    assert "tcp://w4 has none, …" in problem
    assert "tcp://w5" not in problem
