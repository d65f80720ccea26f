"""What a process without a cluster's key reaches: `python stranger.py PORT…` tries ports of the loopback.

Prints a JSON list of what it could do there as another user; where only root could become one, as this one without
a key. Before, it must reach a cluster that needs no key.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
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


async def by_client(address: str, security: Security, patience_s: float = PATIENCE_S) -> str:
    async with Client(
        address, asynchronous=True, security=security, timeout=patience_s, set_as_default=False
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


async def attempts(ports: Iterable[int], kinds: Mapping[str, Security]) -> list[str]:
    """What could be done at these ports by connections of these kinds, and by a browser."""
    found = []
    for address in (f"127.0.0.1:{port}" for port in ports):
        for scheme, security in kinds.items():
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


async def reach_an_open_cluster() -> None:
    """Twice, the second time as another user: the first imports what that one may have no permission to read."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
        for become in (lambda: None, become_another_user):
            become()
            await by_client(scheduler.address, Security(), 60.0)
            await by_message(scheduler.address, Security())
            await by_browser(f"http://127.0.0.1:{scheduler.http_server.port}/health")


async def main(ports: Iterable[int]) -> list[str]:
    kinds = {"tcp": Security(), "tls": Security.temporary()}
    await reach_an_open_cluster()
    return await attempts(ports, kinds)


if __name__ == "__main__":
    import logging

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    print(json.dumps(asyncio.run(main(map(int, sys.argv[1:])))))
