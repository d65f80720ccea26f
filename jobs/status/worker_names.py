"""`WorkerNames`: names of a run's workers, `w0 10.0.0.5`, `w1 gpu-7`, …, in the order in which they were seen.

The coordinator sees workers first, and `state.json` keeps their addresses in this order. All code that shows a worker
names it by this order, so its name is the same everywhere and stays the same when another coordinator takes over.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_HOST_CHARS = 20


class WorkerNames:
    """Names of workers by their Dask addresses. `addresses`: workers seen before, in order."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self.see(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Address of every worker seen, `w0` first."""
        return tuple(self._names)

    def see(self, addresses: Iterable[str]) -> list[str]:
        """Name the workers that were not seen before. Returns their addresses."""
        new = [address for address in addresses if address not in self._names]
        for address in new:
            self._names[address] = f"w{len(self._names)} {host_of(address)}"
        return new

    def name(self, address: str) -> str:
        """The name of a worker; its address without the protocol when it was never seen."""
        return self._names.get(address) or address.rpartition("://")[2]

    def in_text(self, text: str) -> str:
        """A text with names in place of addresses."""
        return re.sub(r"[a-z]+://[^\s,;()'\"]*[^\s,;:.()'\"]", lambda found: self._names.get(found[0], found[0]), text)


def host_of(address: str) -> str:
    """The host in a Dask address: an IP address, or the first label of a host's name."""
    place = address.rpartition("://")[2].partition("/")[0]
    host = place.rpartition(":")[0].strip("[]") or place
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        label = host.partition(".")[0]
        return label if len(label) <= _HOST_CHARS else f"…{label[1 - _HOST_CHARS :]}"


def file_tag(address: str) -> str:
    """A worker's address as part of the name of its log."""
    return "".join(character if character.isalnum() else "-" for character in address.rpartition("//")[2])
