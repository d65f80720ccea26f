"""The plugin by which a run uses a worker's engine: it leaves with its run, also when nobody tells it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster
from distributed.scheduler import Scheduler

from lorabatch.engine.config import EngineConfig
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline.messages import EngineSettings
from lorabatch.pipeline.worker import plugin as plugin_module
from lorabatch.pipeline.worker.plugin import plugin_name
from lorabatch.pipeline.worker.registration import register_plugin, start_engines, unregister_plugin

CHECK_S = 0.5


def engines() -> set[int]:
    """Engine processes of this one's workers."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        # one that ends just now has no command line any more
        with suppress(psutil.NoSuchProcess):
            if "lorabatch.engine.server.process" in process.cmdline():
                found.add(process.pid)
    return found


def wait_for_engines(count: int, than: set[int]) -> None:
    give_up_s = time.monotonic() + 60
    while len(engines() - than) != count:
        assert time.monotonic() < give_up_s, f"{len(engines() - than)} engines, expected {count}"
        time.sleep(0.05)


def test_a_worker_that_nobody_told_that_the_run_is_over_ends_its_engine(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was cut at that moment, or it was just joining the cluster."""
    monkeypatch.setattr(plugin_module, "RUN_CHECK_S", CHECK_S)
    before, settings = engines(), EngineSettings(str(tiny_llama), EngineConfig())
    store = JobStore(str(tmp_path / "output"), {})
    with (
        LocalCluster(1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        lost, kept = (register_plugin(client, job_id, settings, store) for job_id in ("job-1", "job-2"))
        wait_for_engines(1, before)
        scheduler, (worker,) = cluster.scheduler, cluster.workers.values()
        assert isinstance(scheduler, Scheduler)
        del scheduler.worker_plugins[plugin_name(lost)]
        while plugin_name(lost) in worker.plugins:
            time.sleep(CHECK_S / 10)
        time.sleep(3 * CHECK_S)
        assert plugin_name(kept) in worker.plugins, "the other run goes on"
        wait_for_engines(1, before)
        folder = worker.plugins[plugin_name(kept)].engine.folder
        assert folder.exists()
        del scheduler.worker_plugins[plugin_name(kept)]
        wait_for_engines(0, before)
        while folder.exists():  # the last thing that a leaving run removes
            time.sleep(CHECK_S / 10)
        unregister_plugin(client, kept)


def test_a_run_that_starts_its_engines_later_has_none_before_and_then_on_every_worker(
    tiny_llama: Path, tmp_path: Path
) -> None:
    before, settings = engines(), EngineSettings(str(tiny_llama), EngineConfig())
    store = JobStore(str(tmp_path / "output"), {})
    with (
        LocalCluster(1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        scheduler = cluster.scheduler
        assert isinstance(scheduler, Scheduler)
        # One that never needs its engines is removed as any other.
        idle = register_plugin(client, "job-1", settings, store, starts_later=True)
        (worker,) = cluster.workers.values()
        assert worker.plugins[plugin_name(idle)].starts_later
        unregister_plugin(client, idle)
        assert plugin_name(idle) not in worker.plugins
        late = register_plugin(client, "job-1", settings, store, starts_later=True)
        assert engines() == before
        for _ in range(2):
            start_engines(client, late)
        wait_for_engines(1, before)
        cluster.scale(2)  # a worker that comes later starts its engine, too
        wait_for_engines(2, before)
        # The next run of the job takes the place of one whose coordinator is gone.
        again = register_plugin(client, "job-1", settings, store, starts_later=True)
        wait_for_engines(0, before)
        assert [name for name in scheduler.worker_plugins if "job-1" in name] == [plugin_name(again)]
        unregister_plugin(client, again)
