"""Results handed from the supervisor's thread to the task's."""

from __future__ import annotations

import pytest

from lorabatch.engine.request import ExportedRow, Request, Result, SamplingParams
from lorabatch.pipeline.messages import ShardAbandonedError
from lorabatch.pipeline.supervisor.open_shard import OpenShard, ServedRow


def make_shard(*names: str) -> OpenShard:
    return OpenShard(0, [ExportedRow(Request(name, (1,), None, SamplingParams())) for name in names], "run")


def make_row(name: str) -> ServedRow:
    return ServedRow(Result(name, (1,), "text", "length", 1, "base"), 0)


def test_rows_are_taken_once_and_waiting_ends_with_the_last() -> None:
    shard = make_shard("a", "b")
    shard.deliver(make_row("a"))
    assert shard.take(0) == [make_row("a")]
    assert shard.take(0) == []
    assert shard.num_unfinished == 1
    shard.deliver(make_row("b"))
    assert shard.take(timeout_s=60) == [make_row("b")]


def test_more_results_than_rows_are_a_defect() -> None:
    shard = make_shard("a")
    shard.deliver(make_row("a"))
    with pytest.raises(AssertionError, match="has all its results"):
        shard.deliver(make_row("a"))


def test_a_failure_is_raised_after_the_finished_rows_are_taken() -> None:
    shard = make_shard("a", "b")
    shard.deliver(make_row("a"))
    begun = ExportedRow(shard.rows[1].request, (7, 8))
    shard.fail(ShardAbandonedError("the worker stops"), [begun])
    assert len(shard.take(timeout_s=60)) == 1
    with pytest.raises(ShardAbandonedError):
        shard.take(timeout_s=60)
    assert shard.begun == (begun,)


def test_a_failure_after_the_last_row_is_not_raised() -> None:
    shard = make_shard("a")
    shard.deliver(make_row("a"))
    shard.fail(ShardAbandonedError("the worker stops"))
    assert len(shard.take(0)) == 1
    assert shard.take(0) == []
