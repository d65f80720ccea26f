"""A Dask cluster that speaks TLS, its scheduler and each worker on a host of its own, and jobs on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster_under_test import make_certificates, tls_words
from echo_job import ECHO_FOLDER, EchoJob, wait_until

from lorabatch.tests.end_to_end.hosts.network import Network, network

_GENTLE_END_S = 8.0
_JOB_LIMIT_S = 420.0


class HostCluster:
    """`workers`: names of their hosts. There are also the hosts `scheduler`, `client` and `store`."""

    def __init__(self, net: Network, workers: Sequence[str], folder: Path) -> None:
        self.net = net
        self.workers = list(workers)
        self._folder = folder
        self._certificates = make_certificates(folder)
        self._log = (folder / "cluster.log").open("wb")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Scheduler and workers, as their owner starts them."""
        file = self._folder / "scheduler.json"
        self._start("scheduler", ["scheduler", "--port", "8786", "--scheduler-file", str(file), "--no-dashboard"])
        wait_until(file.exists)
        for host in self.workers:
            local = self._folder / host
            self._start(host, ["worker", self.address, "--nthreads", "1", "--local-directory", str(local)])

    def _start(self, host: str, words: list[str]) -> None:
        command = [sys.executable, "-m", "dask", *words, "--host", self.net.address(host), "--protocol", "tls"]
        command = self.net.command(host, [*command, *tls_words(self._certificates)])
        self._processes.append(subprocess.Popen(command, stdout=self._log, stderr=self._log))

    @property
    def address(self) -> str:
        """The scheduler's."""
        return f"tls://{self.net.address('scheduler')}:8786"

    def client(self, job: EchoJob, storage: str = "", **options: Any) -> subprocess.Popen[str]:
        """`lorabatch run` on the host `client`, with echo engines. `storage`: the value of `--storage-options`."""
        given = job.options(cluster=self.address, **self._certificates, **options)
        del given["workers"]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        words += [f"--storage-options={storage}"] if storage else []
        command = self.net.command("client", [sys.executable, str(ECHO_FOLDER / "echo_cli.py"), "run", *words])
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def close(self) -> None:
        """End them politely; what does not end is killed with its host."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GENTLE_END_S)
            process.kill()
            process.wait()
        self._log.close()


@contextmanager
def host_cluster(folder: Path, num_workers: int) -> Iterator[HostCluster]:
    """A running one, gone with its hosts at the end."""
    workers = [f"worker{i}" for i in range(num_workers)]
    folder.mkdir()
    with network("scheduler", "client", "store", *workers) as net:
        cluster = HostCluster(net, workers, folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def end_of(client: subprocess.Popen[str]) -> str:
    """What a client that is done has said; it must have ended well."""
    try:
        _, said = client.communicate(timeout=_JOB_LIMIT_S)
    finally:
        client.kill()
        client.wait()
    assert client.returncode == 0, said
    return said
