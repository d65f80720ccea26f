"""Results handed from the engine's thread to the task's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.pipeline.messages import ShardAbandonedError
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow


def make_shard(*names: str) -> OpenShard:
    return OpenShard(0, [ExportedRow(Request(name, (1,), None, SamplingParams())) for name in names], run="run")


def make_row(name: str) -> ServedRow:
    """A result as the engine names it."""
    return ServedRow(Result(name, (1,), "text", "length", 1, "base"), 0)


def test_rows_are_taken_once() -> None:
    shard = make_shard("a", "b")
    shard.deliver(make_row("run/a"))
    assert shard.take(0) == [make_row("a")]
    assert shard.take(0) == []
    assert shard.num_unfinished == 1


def test_a_row_counts_once_and_strangers_do_not_count() -> None:
    shard = make_shard("a", "b")
    for name in ("a", "a", "stranger"):
        shard.deliver(make_row(f"run/{name}"))
    assert len(shard.take(0)) == 1
    assert shard.num_unfinished == 1


def test_waiting_ends_with_the_last_row() -> None:
    shard = make_shard("a")
    shard.deliver(make_row("run/a"))
    assert len(shard.take(timeout_s=60)) == 1


def test_a_failure_is_raised_after_the_finished_rows_are_taken() -> None:
    shard = make_shard("a", "b")
    shard.deliver(make_row("run/a"))
    shard.fail(ShardAbandonedError("the worker stops"))
    assert len(shard.take(timeout_s=60)) == 1
    with pytest.raises(ShardAbandonedError):
        shard.take(timeout_s=60)


def test_a_failure_after_the_last_row_hurts_nobody() -> None:
    shard = make_shard("a")
    shard.deliver(make_row("run/a"))
    shard.fail(ShardAbandonedError("the worker stops"))
    assert len(shard.take(0)) == 1
    assert shard.take(0) == []


def test_what_was_generated_is_told_with_the_failure_under_the_rows_own_names() -> None:
    shard = make_shard("a", "b")
    begun = replace(shard.rows[1], token_ids=(7, 8))
    assert begun.request.request_id == "run/b"
    shard.fail(ShardAbandonedError("the worker stops"), [begun])
    assert [(row.request.request_id, row.token_ids) for row in shard.begun] == [("b", (7, 8))]
