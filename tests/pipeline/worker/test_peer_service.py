"""What workers answer one another, on real Dask workers with real engines: rows that move, and their adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from distributed import Scheduler, Worker
from echo_host import Host, finish, open_shard, until

from lorabatch.engine.peft.audit import AdapterAudit
from lorabatch.engine.server.frames import RegisterAdapter
from lorabatch.jobs.errors import StorageError
from lorabatch.jobs.record import AdapterRecord
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.migration.peers import (
    AdapterFiles,
    DropRows,
    FetchAdapter,
    FetchResults,
    LendRows,
    PeerLostError,
    PeerRequest,
    Peers,
    RecallRows,
    ReplyT,
    serve_peers,
    stop_serving_peers,
)
from lorabatch.pipeline.worker.adapters import AdapterCache
from lorabatch.pipeline.worker.peer_service import PeerService
from lorabatch.system.codec import MessageError

RUN = "run"
ALPHA = "sha-alpha"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x00weights"}
NOWHERE = "memory://nowhere/alpha"


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An adapter where every worker of this process would have to fetch it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    for name, content in FILES.items():
        fs.pipe_file(f"/bucket/alpha/{name}", content)
    return "memory://bucket/alpha"


def no_audit(name: str, folder: Path) -> AdapterAudit:
    raise AssertionError(f"{name}: nothing is to be learnt of an adapter that is known by its content")


class Dance(PeerRequest[None]):
    """A request of another protocol."""


@dataclass
class Site:
    """A worker with an engine, its adapters and what it answers."""

    worker: Worker
    host: Host
    url: str
    cache: AdapterCache = field(init=False)
    service: PeerService = field(init=False)

    def __post_init__(self) -> None:
        record = AdapterRecord.model_validate({"name": "alpha", "url": self.url, "verdict": "exact", "sha256": ALPHA})
        peers = Peers(self.worker, RUN)
        here = Path(self.worker.local_directory)
        store = JobStore(str(here / "output"))
        self.cache = AdapterCache(peers, lambda: [record], store, no_audit, {}, here / "adapters")
        self.service = PeerService(self.worker, RUN, self.host.engine, peers, self.cache)

    async def files(self) -> dict[str, bytes]:
        adapter = (await self.cache.get([ALPHA], {}))[ALPHA]
        assert isinstance(adapter, RegisterAdapter)
        return {path.name: path.read_bytes() for path in Path(adapter.folder).iterdir()}

    async def ask(self, other: Site, request: PeerRequest[ReplyT]) -> ReplyT:
        return await Peers(self.worker, RUN).ask(other.worker.address, request)

    async def fetch_from(self, other: Site) -> None:
        """Fetch alpha; `other` is named as a worker that has it."""
        await self.cache.get([ALPHA], {ALPHA: other.worker.address})


@asynccontextmanager
async def sites(tmp_path: Path, urls: list[str], hosts: list[Host]) -> AsyncIterator[list[Site]]:
    """A worker for each host, with alpha where its url says."""
    options: dict[str, Any] = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(port=0, **options))
        found = []
        for number, (url, host) in enumerate(zip(urls, hosts, strict=True)):
            local = tmp_path / f"worker-{number}"
            local.mkdir()
            made = Worker(scheduler.address, nthreads=1, local_directory=str(local), **options)
            worker = await stack.enter_async_context(made)
            found.append(Site(worker, host, url))
        yield found


def test_rows_go_with_their_adapter_to_a_helper_that_cannot_get_it_elsewhere(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        engines = [hosts(gate=str(tmp_path / "gate")), hosts(step_s=0.01)]
        async with sites(tmp_path, [storage, NOWHERE], engines) as (owner, helper):
            shard = open_shard(owner.host, 6, (await owner.cache.get([ALPHA], {}))[ALPHA])
            await until(lambda: any(report.running_rows for report in owner.host.reports))
            # As the coordinator does, from whatever worker it is on.
            await helper.ask(owner, LendRows(7, 4, helper.worker.address))
            await until(lambda: shard.num_unfinished == 2)
            assert await helper.files() == FILES
            (tmp_path / "gate").touch()
            await finish(shard, 6, ALPHA)

    asyncio.run(story())


def test_rows_whose_adapter_a_helper_cannot_get_stay_with_their_owner(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        engines = [hosts(gate=str(tmp_path / "gate")), hosts()]
        async with sites(tmp_path, [storage, NOWHERE], engines) as (owner, helper):
            adapter = (await owner.cache.get([ALPHA], {}))[ALPHA]
            shard = open_shard(owner.host, 4, adapter)
            await until(lambda: any(report.running_rows for report in owner.host.reports))
            Path(adapter.folder).rename(tmp_path / "taken-away")
            await helper.ask(owner, LendRows(7, 3, helper.worker.address))
            await until(lambda: owner.host.reports[-1].lent_rows == 0)
            (tmp_path / "gate").touch()
            await finish(shard, 4, ALPHA)
            assert not any(report.incoming_rows for report in helper.host.reports)

    asyncio.run(story())


def test_an_adapter_comes_from_the_named_worker_which_fetches_it_first(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with sites(tmp_path, [storage, NOWHERE], [hosts(), hosts()]) as (first, second):
            await second.fetch_from(first)
            assert await second.files() == await first.files() == FILES

    asyncio.run(story())


def test_an_adapter_that_the_named_worker_does_not_give_comes_from_storage(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with sites(tmp_path, [NOWHERE, storage], [hosts(), hosts()]) as (first, second):
            await second.fetch_from(first)
            assert await second.files() == FILES

    asyncio.run(story())


def test_files_that_would_lie_elsewhere_are_not_taken_from_anybody(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with sites(tmp_path, [storage, storage], [hosts(), hosts()]) as (first, second):

            async def reply_to(request: object) -> AdapterFiles:
                return AdapterFiles({"../outside": 1})

            serve_peers(first.worker, RUN, reply_to)
            await second.fetch_from(first)
            assert await second.files() == FILES
            assert not list(tmp_path.rglob("outside"))

    asyncio.run(story())


def test_an_adapter_that_no_worker_has_is_an_error_that_names_it(hosts: Callable[..., Host], tmp_path: Path) -> None:
    async def story() -> None:
        async with sites(tmp_path, [NOWHERE, NOWHERE], [hosts(), hosts()]) as (first, second):
            with pytest.raises(StorageError, match="nowhere/alpha"):
                await second.fetch_from(first)

    asyncio.run(story())


def test_incoming_rows_are_given_back_when_their_owner_calls_and_when_their_host_leaves(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        engines = [hosts(gate=str(tmp_path / "gate")), hosts(step_s=0.05, trace=str(tmp_path / "by-helper"))]
        async with sites(tmp_path, [storage, storage], engines) as (owner, helper):
            shard = open_shard(owner.host, 4)
            await until(lambda: any(report.running_rows for report in owner.host.reports))
            await helper.ask(owner, LendRows(7, 4, helper.worker.address))
            await until((tmp_path / "by-helper").exists)
            await owner.service.outgoing.call_back(60)
            await helper.service.incoming.depart(60)
            await asyncio.to_thread(owner.host.supervisor.leave, RUN, 10)
            begun = {row.request.request_id: len(row.token_ids) for row in shard.begun}
            assert sum(begun.values()) == sum(map(int, (tmp_path / "by-helper").read_text().split())) > 0

    asyncio.run(story())


def test_unknown_requests_and_those_of_another_run_are_errors_and_the_service_goes_on(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with sites(tmp_path, [storage, storage], [hosts(), hosts()]) as (first, second):
            with pytest.raises(MessageError, match="type='Dance': expected one of LendRows"):
                await first.ask(second, Dance())
            with pytest.raises(PeerLostError, match="KeyError"):
                await first.ask(second, FetchResults("unknown", ()))
            with pytest.raises(PeerLostError, match="no engine of this run"):
                await Peers(first.worker, "another-run").ask(second.worker.address, FetchAdapter(ALPHA))
            # Loans that are over may be dropped and recalled again.
            await first.ask(second, DropRows("unknown"))
            await first.ask(second, RecallRows("unknown"))
            sizes = {name: len(content) for name, content in FILES.items()}
            assert (await first.ask(second, FetchAdapter(ALPHA))).sizes == sizes

    asyncio.run(story())


def test_a_closed_service_replies_to_no_worker(hosts: Callable[..., Host], storage: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with sites(tmp_path, [storage, storage], [hosts(), hosts()]) as (first, second):
            stop_serving_peers(second.worker, RUN)
            with pytest.raises(PeerLostError, match="no engine of this run"):
                await first.ask(second, FetchAdapter(ALPHA))

    asyncio.run(story())


def test_a_worker_that_is_too_slow_to_reply_is_lost_for_a_reason_that_is_named(
    hosts: Callable[..., Host], storage: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with sites(tmp_path, [storage, storage], [hosts(), hosts()]) as (first, second):
            peers = Peers(first.worker, RUN)
            with pytest.raises(PeerLostError, match=r"does not answer \(TimeoutError\)"):
                await peers.ask(second.worker.address, FetchAdapter(ALPHA), timeout_s=0)

    asyncio.run(story())
