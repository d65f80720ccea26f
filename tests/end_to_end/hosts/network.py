"""Hosts of a test: network namespaces with addresses of their own, on one switch that the test commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from lorabatch.tests.end_to_end.hosts.switch import Weather

_SWITCH = Path(__file__).with_name("switch.py")
_END_LIMIT_S = 60


@cache
def why_no_hosts() -> str | None:
    """Why this machine cannot have network namespaces, as a sentence; None if it can."""
    if os.geteuid() != 0:
        return "Hosts of their own are network namespaces, which only root can make."
    if shutil.which("ip") is None:
        return "Hosts of their own are made by `ip`, of the package iproute2, which is not installed."
    probe = f"probe-{uuid4().hex[:8]}"
    with subprocess.Popen(_command(probe, ["a"]), stdin=subprocess.PIPE, **_PIPES) as switch:
        _, said = switch.communicate()
    return None if switch.returncode == 0 else f"This system has no network namespaces or TAP devices: {said[-200:]}"


_PIPES: dict[str, Any] = {
    "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True,
}  # fmt: skip


def _command(prefix: str, names: Sequence[str]) -> list[str]:
    return [sys.executable, str(_SWITCH), prefix, *names]


class Network:
    """Hosts by name. Nothing of theirs reaches this machine's interfaces, or the other way round."""

    def __init__(self, names: Sequence[str], switch: subprocess.Popen[str], prefix: str) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._switch = switch
        self._prefix = prefix

    def address(self, host: str) -> str:
        """Its IP address."""
        return f"10.20.0.{self._places[host] + 1}"

    def host_of(self, dask_address: str) -> str:
        """The host that an address such as `tls://10.20.0.2:1234` belongs to."""
        address = dask_address.rpartition("://")[2].rpartition(":")[0]
        return next(host for host in self._places if self.address(host) == address)

    def namespace(self, host: str) -> str:
        """What `ip netns` calls it."""
        return f"{self._prefix}-{host}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The same command on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def set_weather(self, *cuts: tuple[str, str], one_way: Sequence[tuple[str, str]] = (), **weather: float) -> None:
        """From now on, until it is set again: see `Weather`."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(asdict(Weather(cuts, tuple(one_way), **weather))) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline(), "the switch has ended"


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Hosts of these names. At the end all processes on them are killed, and the hosts removed."""
    prefix = f"test-{uuid4().hex[:8]}"
    switch = subprocess.Popen(_command(prefix, names), stdin=subprocess.PIPE, **_PIPES)
    assert switch.stdout is not None
    assert switch.stderr is not None
    try:
        if not switch.stdout.readline():
            raise OSError(switch.stderr.read())
        yield Network(names, switch, prefix)
    finally:
        switch.communicate(timeout=_END_LIMIT_S)
