"""Whole jobs on a real cluster: rows in, rows out, each once, each right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lorabatch.pipeline.run import run

ECHO = "echo_engine:EchoEngine"


def test_rows_in_are_rows_out_with_their_columns(echo_job: Any, rows_of: Callable[..., Any]) -> None:
    rows = rows_of(150)
    echo_job.write_input(rows)
    result = run(echo_job.spec(), engine_factory=ECHO)
    echo_job.assert_answered(rows)
    assert (result.num_rows, result.num_errors) == (150, 0)
    assert {row["note"] for row in echo_job.rows()} == {row["note"] for row in rows}
    assert (echo_job.output / "_SUCCESS").exists()
