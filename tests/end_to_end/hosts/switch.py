"""A switch between hosts, as a process of its own: `python switch.py PREFIX NAME…`.

Each name becomes a network namespace `PREFIX-NAME` with a loopback and one interface, a TAP device, whose other end is
here. A frame goes to the host of its destination, unless the two are cut off from each other; it may come late, too
late or not at all. Linux has this as `tc netem`, which many kernels lack; partitions between two hosts it has not.

A line of JSON on standard input sets `Weather`; a line of JSON is the reply. When standard input ends, and so also when
whoever started the switch was killed, the namespaces are removed and the processes in them killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST_FRAME = 1 << 16
BROADCAST = b"\xff" * 6


@dataclass(frozen=True)
class Weather:
    """`cuts`: pairs of hosts between which nothing passes; `one_way`: nothing from the first of a pair to the second.
    `loss`, `reordering`: shares of the frames that are lost, or held back for twice the delay and 10 ms more, so that
    later ones overtake them.
    """

    cuts: tuple[tuple[str, str], ...] = ()
    one_way: tuple[tuple[str, str], ...] = ()
    delay_s: float = 0.0
    loss: float = 0.0
    reordering: float = 0.0


class Switch:
    """Hosts by their place in the list: host i has the address 10.20.0.(i + 1) and a hardware address that ends so."""

    def __init__(self, prefix: str, names: list[str]) -> None:
        self._prefix = prefix
        self._names = names
        self._taps: list[int] = []
        self._cuts: set[tuple[int, int]] = set()
        self._weather = Weather()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._luck = random.Random(0)

    def open(self) -> None:
        """Make the namespaces and their interfaces."""
        for place, name in enumerate(self._names):
            host = f"{self._prefix}-{name}"
            ip("netns", "add", host)
            self._taps.append(open_tap(host))
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "net0", "address", f"02:00:00:00:00:{place + 1:02x}")
            ip("-n", host, "address", "add", f"10.20.0.{place + 1}/24", "dev", "net0")
            ip("-n", host, "link", "set", "net0", "up")

    def serve(self) -> None:
        """Forward frames until standard input ends."""
        while True:
            pause_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([0, *self._taps], [], [], pause_s)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, tap, frame = heapq.heappop(self._late)
                write(tap, frame)
            for source, tap in enumerate(self._taps):
                if tap in ready:
                    self._forward(source, os.read(tap, LARGEST_FRAME))
            if 0 in ready:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                self._set(Weather(**json.loads(line)))
                print("{}", flush=True)

    def _set(self, weather: Weather) -> None:
        places = {name: place for place, name in enumerate(self._names)}
        self._weather = weather
        cuts = [*weather.one_way, *(both for pair in weather.cuts for both in (pair, pair[::-1]))]
        self._cuts = {(places[a], places[b]) for a, b in cuts}

    def _forward(self, source: int, frame: bytes) -> None:
        to = frame[:6]
        targets = range(len(self._taps)) if to == BROADCAST else [to[5] - 1]
        for target in targets:
            if target != source and 0 <= target < len(self._taps) and (source, target) not in self._cuts:
                self._send(self._taps[target], frame)

    def _send(self, tap: int, frame: bytes) -> None:
        weather = self._weather
        if self._luck.random() < weather.loss:
            return
        late_s = weather.delay_s
        if self._luck.random() < weather.reordering:
            late_s = 2 * late_s + 0.01
        if late_s:
            heapq.heappush(self._late, (time.monotonic() + late_s, next(self._count), tap, frame))
        else:
            write(tap, frame)

    def close(self) -> None:
        """Kill what runs in the namespaces, and remove them."""
        for name in self._names:
            host = f"{self._prefix}-{name}"
            found = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def ip(*words: str) -> None:
    """The command of that name."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def inside(host: str) -> Iterator[None]:
    """This thread is in the namespace meanwhile: sockets and devices that it opens stay there."""
    home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{host}", os.O_RDONLY)
    try:
        set_namespace(there)
        yield
        set_namespace(home)
    finally:
        os.close(home)
        os.close(there)


def set_namespace(descriptor: int) -> None:
    """What `os.setns` does since Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def open_tap(host: str) -> int:
    """An interface `net0` in the namespace; reading gives the frames that the host sends."""
    with inside(host):
        tap = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TAP | IFF_NO_PI))
    return tap


def write(tap: int, frame: bytes) -> None:
    """A frame that the host has no room for is lost, as on any network."""
    with contextlib.suppress(OSError):
        os.write(tap, frame)


def main() -> None:
    """Say `{}` when all hosts are there; forward until the end."""
    switch = Switch(sys.argv[1], sys.argv[2:])
    try:
        switch.open()
        print("{}", flush=True)
        switch.serve()
    finally:
        switch.close()


if __name__ == "__main__":
    main()
