"""Rows on loan between two real engines: they come back answered, or as they are, whoever leaves or falls silent."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import echo_engine
import msgpack
import pytest

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.exported_row import ExportedRow
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.wire import unpack_exported_row
from lorabatch.pipeline.engine_keeper import EngineKeeper
from lorabatch.pipeline.engine_share import EngineShare
from lorabatch.pipeline.guests import Guests
from lorabatch.pipeline.loans import Loans
from lorabatch.pipeline.messages import EngineSettings, HostReport
from lorabatch.pipeline.open_shard import OpenShard
from lorabatch.pipeline.peers import PeerLostError

TOKENS = 20


class Host:
    """An engine with its guests, and the last that it reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir()
        (folder / "echo.json").write_text(json.dumps(options))
        settings = EngineSettings(
            "model", EngineConfig(num_threads=1, max_batch_rows=4), factory="echo_engine:EchoEngine"
        )
        self.reports: list[HostReport] = []
        self.keeper = EngineKeeper(settings, lambda: folder, folder, "tcp://worker")
        self.share: EngineShare = self.keeper.join("run", self.reports.append)


class Line:
    """The way from an owner to a helper: questions and answers as msgpack carries them, until it `is_cut`."""

    def __init__(self, guests: Guests) -> None:
        self._guests = guests
        self.is_cut = False
        self.asked: list[str] = []

    async def ask(self, address: str, question: str, timeout_s: float = 4.0, **content: Any) -> dict[str, Any]:
        self.asked.append(question)
        if self.is_cut:
            raise PeerLostError(f"{address} does not answer")
        given = msgpack.unpackb(msgpack.packb(content), raw=False)
        try:
            answer = self._answer(question, given)
        except Exception as error:
            raise PeerLostError(f"{address}: {error}") from None
        return msgpack.unpackb(msgpack.packb(answer), raw=False)  # type: ignore[no-any-return]

    def _answer(self, question: str, given: dict[str, Any]) -> dict[str, Any]:
        match question:
            case "receive":
                self._guests.receive(given["loan_id"], [unpack_exported_row(raw) for raw in given["rows"]], [])
            case "results":
                return self._guests.results(**given)
            case "drop":
                self._guests.drop(**given)
        return {}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Start an engine with the echo engine's options."""
    monkeypatch.setenv("PYTHONPATH", str(Path(echo_engine.__file__).parent), prepend=os.pathsep)
    made: list[Host] = []

    def start(**options: Any) -> Host:
        made.append(Host(tmp_path / f"engine-{len(made)}", **options))
        return made[-1]

    yield start
    for host in made:
        host.keeper.close(10)


def open_shard(owner: Host, num_rows: int) -> OpenShard:
    requests = [Request(f"row-{i}", (i,), None, SamplingParams(max_tokens=TOKENS)) for i in range(num_rows)]
    return owner.share.open(7, map(ExportedRow, requests), [])


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not claim():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def lending(owner: Host, helper: Host, num_rows: int) -> AsyncIterator[tuple[Line, Awaitable[None]]]:
    """A loan of rows of shard 7 from owner to helper that has begun."""
    await until(lambda: any(report.running_rows for report in owner.reports))
    line = Line(Guests(helper.share, patience_s=1.0))
    loans = Loans(owner.share, line, "tcp://owner")  # type: ignore[arg-type]
    task = asyncio.create_task(loans.lend(7, num_rows, "tcp://helper"))
    await until(lambda: "results" in line.asked)
    yield line, task
    await asyncio.wait_for(task, 60)


async def finish(shard: OpenShard, num_rows: int) -> None:
    """Every row comes, once, with its one right answer."""
    answers: dict[str, str] = {}
    while len(answers) < num_rows:
        for row in await asyncio.to_thread(shard.take, 0.2):
            assert row.result.request_id not in answers
            answers[row.result.request_id] = row.result.text
    assert answers == {f"row-{i}": echo_engine.answer((i,), None, TOKENS) for i in range(num_rows)}


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
            await asyncio.to_thread(helper.keeper.leave, "run", 10)
            await task
            assert line.asked[-1] == "results"
        (tmp_path / "gate").touch()
        await finish(shard, 4)
        generated = {name: sum(map(int, (tmp_path / name).read_text().split())) for name in ("by-owner", "by-helper")}
        assert generated["by-helper"] > 0
        assert sum(generated.values()) == 4 * TOKENS

    asyncio.run(story())


def test_rows_of_a_helper_that_falls_silent_go_on_at_the_owner(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        async with lending(owner, helper, 3) as (line, task):
            line.is_cut = True
            await task
        (tmp_path / "gate").touch()
        await finish(shard, 4)
        # Nobody asks for the guests any more: they leave the helper's engine.
        await until(lambda: bool(helper.reports) and helper.reports[-1].guest_rows == 0)

    asyncio.run(story())


def test_guests_whose_shard_was_given_up_are_dropped(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        owner, helper = hosts(gate=str(tmp_path / "gate")), hosts(gate=str(tmp_path / "never"))
        shard = open_shard(owner, 4)
        async with lending(owner, helper, 3) as (line, task):
            owner.share.abandon(shard)
            await task
            assert line.asked[-1] == "drop"
        await until(lambda: helper.reports[-1].guest_rows == 0)

    asyncio.run(story())
