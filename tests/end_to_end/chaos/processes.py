"""The processes of one trial: found by a mark in their environment, distinguished by their command lines."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from lorabatch.tests.end_to_end.chaos.scenario import Victim
from lorabatch.tests.end_to_end.hosts.network import Network

MARK, HOST = "LORABATCH_TRIAL", "LORABATCH_TRIAL_HOST"
_POLL_S = 0.1
_START_LIMIT_S = 300.0
_GENTLE_END_S = 8.0
_OTHER_USER = Path(__file__).with_name("other_user.py")
_WAIT_FOR_WORKERS = f"""
import sys
from distributed import Client
with Client(scheduler_file=sys.argv[1], timeout={_START_LIMIT_S}) as client:
    client.wait_for_workers(int(sys.argv[2]), timeout={_START_LIMIT_S})
"""


def marked(mark: str) -> list[psutil.Process]:
    """Every process of this machine that was started for the trial, by whatever detour; zombies are none."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def of_kind(processes: Iterable[psutil.Process], kind: Victim) -> list[psutil.Process]:
    """Those of them that are workers, engines, …, the oldest first."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if _kind(" ".join(process.cmdline())) == kind:
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found, key=lambda entry: entry[:2])]


def listening_at(processes: Iterable[psutil.Process], address: str, host: str | None) -> list[psutil.Process]:
    """The one among them that a Dask address such as `tcp://127.0.0.1:1234` belongs to, if it is alive. `host`: of its
    own, by name.
    """
    port, found = int(address.rpartition(":")[2]), []
    for process in processes:
        with suppress(psutil.Error):
            sockets = process.net_connections(kind="tcp")
            is_there = any(s.laddr.port == port and s.status == psutil.CONN_LISTEN for s in sockets)
            if is_there and process.environ().get(HOST) == host:
                found.append(process)
    return found


def _kind(command: str) -> Victim | None:
    if "lorabatch.engine.server.process" in command:
        return "engine"
    if "lorabatch.engine.parallel.member" in command:
        return "member"
    if "multiprocessing.spawn" in command or "forkserver" in command:
        return "worker"
    if "dask scheduler" in command:
        return "scheduler"
    if "dask worker" in command:
        return "nanny"
    return "client" if " run " in command or " resume " in command else None


def wait_until_gone(mark: str, timeout_s: float) -> list[psutil.Process]:
    """Processes of the trial that are still there after so long."""
    give_up_s = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    return left


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill these, stopped ones too."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


class ExistingCluster:
    """A Dask scheduler and nannied workers as processes of their own, set up as `docs/guides/clusters.md` says: only
    the scheduler gives a silent worker up sooner, so that a stopped coordinator does not take a trial's minutes.
    `net`: the hosts that they are on, each on its own.
    """

    def __init__(self, folder: Path, environment: dict[str, str], num_workers: int, net: Network | None = None) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._environment = environment | {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "20s"}
        self._net = net
        self._log = (folder / "dask.log").open("ab")
        words = ("scheduler", "--port", "0", "--dashboard-address", "127.0.0.1:0")
        self._processes = [self._start("scheduler", words)]
        self._hosts: dict[subprocess.Popen[bytes], str] = {}
        for place in range(num_workers):
            self.start_nanny(f"worker{place}")
        file = folder / "scheduler.json"
        wait = [sys.executable, "-c", _WAIT_FOR_WORKERS, str(file), str(num_workers)]
        command = wait if net is None else net.command("client", wait)
        subprocess.run(command, check=True, env=environment, timeout=2 * _START_LIMIT_S)
        self.address = str(json.loads(file.read_text())["address"])

    def start_nanny(self, host: str) -> None:
        """One more worker on a host, with its nanny, unless the cluster has ended."""
        if self._log.closed:
            return
        options = ("--nthreads", "1", "--local-directory", str(self._folder), "--no-dashboard")
        process = self._start(host, ("worker", *options))
        self._processes.append(process)
        self._hosts[process] = host

    def have_other_user(self, does: str, pick: int, seconds: float) -> None:
        """Another user of the cluster does what `other_user.py` says, until the cluster ends."""
        command = [sys.executable, str(_OTHER_USER), self.address, does, str(pick), str(seconds)]
        command = command if self._net is None else self._net.command("client", command)
        environment = self._environment if self._net is None else self._environment | {HOST: "client"}
        self._processes.append(subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log))

    def ended_workers(self) -> list[str]:
        """The hosts of workers that have ended since the last call, however: a batch system starts others there. One
        that is cut off while it starts gives up after 30 s; one that was cut off is closed when it is heard of again.
        """
        ended = [process for process in self._hosts if process.poll() is not None]
        for process in ended:
            self._processes.remove(process)
        return [self._hosts.pop(process) for process in ended]

    def _start(self, host: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *words, "--scheduler-file", str(self._folder / "scheduler.json")]
        if self._net is None:
            command += ["--host", "127.0.0.1"]
            return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)
        command = self._net.command(host, [*command, "--host", self._net.address(host)])
        return subprocess.Popen(command, env=self._environment | {HOST: host}, stdout=self._log, stderr=self._log)

    @property
    def is_whole(self) -> bool:
        """Whether the scheduler and at least one nanny are alive and not stopped."""
        return _is_running(self._processes[0]) and any(_is_running(process) for process in self._hosts)

    def close(self) -> None:
        """End it as its owner would: politely, then not."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        give_up_s = time.monotonic() + _GENTLE_END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up_s - time.monotonic()))
            process.kill()
            process.wait()
        self._log.close()


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return False
    with suppress(psutil.Error):
        return psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    return False


def send(process: psutil.Process, name: str) -> bool:
    """Send a signal by its name; False when the process is gone."""
    try:
        os.kill(process.pid, getattr(signal, f"SIG{name}"))
    except ProcessLookupError:
        return False
    return True


def give_no_more_memory(process: psutil.Process) -> bool:
    """Have the process get no memory beyond what it has; False when it is gone."""
    try:
        has = process.memory_info().vms
        resource.prlimit(process.pid, resource.RLIMIT_AS, (has, has))
    except (psutil.Error, ProcessLookupError):
        return False
    return True
