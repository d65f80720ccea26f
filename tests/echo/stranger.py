"""What a process without a cluster's key reaches: `python stranger.py PORT…` tries ports of the loopback.

Prints a JSON list of what it could do there as another user, or as this one, who has no key at hand, where only root
could become another. Before, it tries a cluster without a key, where it must reach something.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from distributed import Client, Scheduler
from distributed.core import rpc
from distributed.protocol.pickle import dumps
from distributed.security import Security

NOBODY = 65534
PATIENCE_S = 5.0
PATHS = (
    "/", "/status", "/lora", "/lora.json", "/lora/metrics", "/metrics", "/health", "/info/main/workers.html",
    "/json/identity.json", "/json/counts.json", "/sitemap.json", "/eventstream",
)  # fmt: skip


def reached(ports: Iterable[int]) -> list[str]:
    """What a stranger can do at these ports."""
    command = [sys.executable, __file__, *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


async def by_client(address: str, security: Security) -> str:
    async with Client(
        address, asynchronous=True, security=security, timeout=PATIENCE_S, set_as_default=False
    ) as client:
        return f"{await client.run_on_scheduler(os.getuid)} {await client.run(os.getuid)}"


async def by_message(address: str, security: Security) -> str:
    """To a worker or a nanny."""
    async with rpc(address, connection_args=security.get_connection_args("client")) as node:
        return str(await node.run(function=dumps(os.getuid), args=dumps(()), kwargs=dumps({}), wait=True))


async def by_browser(address: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as reply:
            return f"{reply.status} {reply.url} {reply.read(80)!r}"

    return await asyncio.to_thread(get)


async def attempt(name: str, act: Callable[[], Awaitable[str]]) -> str:
    """What happened, "" for nothing."""
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            return f"{name}: {await act()}"
    except Exception:
        return ""


async def attempts(ports: Iterable[int]) -> list[str]:
    kinds: list[tuple[str, Security]] = [("tcp", Security()), ("tls", Security.temporary())]
    found = []
    for address in (f"127.0.0.1:{port}" for port in ports):
        for scheme, security in kinds:
            url = f"{scheme}://{address}"
            calls: tuple[Any, ...] = (by_client, by_message)
            found += [attempt(f"{call.__name__} {url}", lambda c=call, u=url, s=security: c(u, s)) for call in calls]
        found += [attempt("GET", lambda u=f"http://{address}{path}": by_browser(u)) for path in PATHS]
    return [what for what in await asyncio.gather(*found) if what]


def become_another_user() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


async def main(ports: Iterable[int]) -> list[str]:
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
        without_key = [scheduler.port, scheduler.http_server.port]
        # The first time imports what another user may have no permission to read.
        for become in (lambda: None, become_another_user):
            become()
            kinds: set[str] = set()
            while kinds != {"by_client", "by_message", "GET:"}:  # a busy machine may take longer than patience
                kinds |= {what.split()[0] for what in await attempts(without_key)}
    return await attempts(ports)


if __name__ == "__main__":
    import logging

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    print(json.dumps(asyncio.run(main(map(int, sys.argv[1:])))))
