"""Rows lent between two real engines: they come back answered, or as they are, whichever side leaves or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from echo_host import TOKENS, Host, finish, open_shard, until

from lorabatch.pipeline.messages import ShardAbandonedError
from lorabatch.pipeline.migration.incoming import IncomingRows
from lorabatch.pipeline.migration.outgoing import OutgoingRows
from lorabatch.pipeline.migration.peers import (
    DropRows,
    FetchResults,
    LendRows,
    PeerLostError,
    PeerRequest,
    PeerUnreachableError,
    RecallRows,
    ReceiveRows,
    ReplyT,
)
from lorabatch.pipeline.supervisor.queue import EngineQueue


class Line:
    """The way from an owner to a helper: requests and replies, until it `is_cut`."""

    def __init__(self, incoming: IncomingRows) -> None:
        self._incoming = incoming
        self.is_cut = False
        self.asked: list[type[PeerRequest[Any]]] = []

    async def ask(self, address: str, request: PeerRequest[ReplyT], timeout_s: float = 4.0) -> ReplyT:
        self.asked.append(type(request))
        if self.is_cut:
            raise PeerUnreachableError(f"{address} does not answer")
        try:
            return cast(ReplyT, self._reply_to(request))
        except Exception as error:
            raise PeerLostError(f"{address}: {error}") from None

    def _reply_to(self, request: object) -> object:
        match request:
            case ReceiveRows():
                self._incoming.receive(request.loan_id, request.rows, [])
            case FetchResults():
                return self._incoming.results(request.loan_id, request.acknowledged)
            case RecallRows():
                self._incoming.recall(request.loan_id)
            case DropRows():
                self._incoming.drop(request.loan_id)
        return None


@asynccontextmanager
async def lending(owner: Host, helper: Host, num_rows: int) -> AsyncIterator[tuple[Line, Awaitable[None]]]:
    """A loan of rows of shard 7 from owner to helper that has begun."""
    await until(lambda: any(report.running_rows for report in owner.reports))
    line = Line(IncomingRows(helper.engine, patience_s=1.0))
    outgoing = OutgoingRows(owner.engine, line, "tcp://owner")  # type: ignore[arg-type]
    task = asyncio.create_task(outgoing.lend(LendRows(7, num_rows, "tcp://helper")))
    await until(lambda: FetchResults in line.asked)
    yield line, task
    await asyncio.wait_for(task, 60)


def test_lent_rows_are_answered_by_the_helper(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(step_s=0.01)
        shard = open_shard(owner, 6)
        async with lending(owner, helper, 4) as (_, task):
            await task
        # The owner's own engine has not made one step.
        await until(lambda: shard.num_unfinished == 2)
        (tmp_path / "gate").touch()
        await finish(shard, 6)

    asyncio.run(story())


def test_a_helper_that_leaves_gives_rows_back_with_what_it_has_generated(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    async def story() -> None:
        owner = hosts(gate=str(tmp_path / "gate"), trace=str(tmp_path / "by-owner"))
        helper = hosts(step_s=0.1, trace=str(tmp_path / "by-helper"))
        shard = open_shard(owner, 4)
        async with lending(owner, helper, 4) as (line, task):
            await until((tmp_path / "by-helper").exists)
            await asyncio.to_thread(helper.supervisor.leave, "run", 10)
            await task
            assert line.asked[-1] is FetchResults
        (tmp_path / "gate").touch()
        await finish(shard, 4)
        generated = {name: sum(map(int, (tmp_path / name).read_text().split())) for name in ("by-owner", "by-helper")}
        assert generated["by-helper"] > 0
        assert sum(generated.values()) == 4 * TOKENS

    asyncio.run(story())


@pytest.mark.long
def test_rows_of_a_helper_that_falls_silent_go_on_at_the_owner(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        async with lending(owner, helper, 3) as (line, task):
            line.is_cut = True
            await task
        (tmp_path / "gate").touch()
        await finish(shard, 4)
        # The owner does not ask any more: its rows leave the helper's engine.
        await until(lambda: bool(helper.reports) and helper.reports[-1].incoming_rows == 0)

    asyncio.run(story())


def test_rows_are_not_lent_again_to_a_helper_that_could_not_be_reached(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        await until(lambda: any(report.running_rows for report in owner.reports))
        line = Line(IncomingRows(helper.engine))
        line.is_cut = True
        outgoing = OutgoingRows(owner.engine, line, "tcp://owner")  # type: ignore[arg-type]
        await outgoing.lend(LendRows(7, 3, "tcp://helper"))
        assert line.asked == [ReceiveRows]
        outgoing.begin(LendRows(7, 3, "tcp://helper"))
        outgoing.begin(LendRows(7, 3, "tcp://another"))
        await until(lambda: len(line.asked) > 1)
        (tmp_path / "gate").touch()
        await finish(shard, 4)
        # Only the other one was asked.
        assert line.asked == [ReceiveRows] * 2

    asyncio.run(story())


def test_incoming_rows_whose_shard_was_given_up_are_dropped(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        async with lending(owner, helper, 3) as (line, task):
            owner.engine.submit(EngineQueue.abandon, shard)
            await task
            assert line.asked[-1] is DropRows
        await until(lambda: helper.reports[-1].incoming_rows == 0)

    asyncio.run(story())


def test_an_owner_that_leaves_gets_rows_back_with_what_the_helper_has_generated(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    async def story() -> None:
        owner = hosts(gate=str(tmp_path / "gate"))
        helper = hosts(step_s=0.1, trace=str(tmp_path / "by-helper"))
        shard = open_shard(owner, 4)
        await until(lambda: any(report.running_rows for report in owner.reports))
        line = Line(IncomingRows(helper.engine))
        outgoing = OutgoingRows(owner.engine, line, "tcp://owner")  # type: ignore[arg-type]
        outgoing.begin(LendRows(7, 4, "tcp://helper"))
        await until((tmp_path / "by-helper").exists)
        await outgoing.call_back(60)
        assert line.asked.count(RecallRows) == 1
        await asyncio.to_thread(owner.supervisor.leave, "run", 10)
        with pytest.raises(ShardAbandonedError):
            shard.take(0)
        generated = sum(map(int, (tmp_path / "by-helper").read_text().split()))
        assert 0 < sum(len(row.token_ids) for row in shard.begun) == generated < 4 * TOKENS
        # Nothing is lent any more.
        outgoing.begin(LendRows(7, 4, "tcp://helper"))
        assert line.asked.count(ReceiveRows) == 1
        await until(lambda: helper.reports[-1].incoming_rows == 0)

    asyncio.run(story())


def test_a_helper_that_does_not_give_rows_back_is_not_waited_for(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        await until(lambda: any(report.running_rows for report in owner.reports))
        line = Line(IncomingRows(helper.engine, patience_s=1.0))
        outgoing = OutgoingRows(owner.engine, line, "tcp://owner")  # type: ignore[arg-type]
        outgoing.begin(LendRows(7, 3, "tcp://helper"))
        await until(lambda: FetchResults in line.asked)
        line.is_cut = True
        await outgoing.call_back(0.0)
        (tmp_path / "gate").touch()
        await finish(shard, 4)

    asyncio.run(story())
