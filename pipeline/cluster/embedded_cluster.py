"""`EmbeddedCluster`: a Dask cluster on this machine's loopback interface that only its user can use.

Every connection needs a key that is made for the cluster and stays in the memory of its processes. The dashboard, which
browsers open without a key, has a token in its address. Other users of the machine reach the ports, and are refused.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
from distributed import Scheduler
from distributed.deploy.spec import SpecCluster
from tornado import web
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest, split_host_and_port
from tornado.routing import Router

from .late_dashboard import WITHOUT_PAGES, LateDashboard
from .security import temporary_security
from .worker_process import EmbeddedNanny

_HOST = "127.0.0.1"
# Index tasks use one thread each; shard tasks secede and do not count.
_TASK_THREADS = 1
# Host names that no name server is asked about, so that no other machine's page can have a browser take one for its
# own.
_LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


class EmbeddedCluster(SpecCluster):
    """A scheduler in this process and nannies with workers below it.

    `start_limit_s`: seconds that a worker may take to start. `folder`: holds the workers' files. Dask's default folder,
    `dask-scratch-space`, belongs to the first user who needs it, and Python looks for modules in it.
    """

    def __init__(self, num_workers: int, start_limit_s: float, folder: Path) -> None:
        self._token = secrets.token_urlsafe(16)
        security = temporary_security()
        common: dict[str, Any] = {"host": _HOST, "protocol": "tls://", "security": security}
        common["local_directory"] = str(folder)
        # a worker that hangs while it starts must not hang the command
        of_workers = {"nthreads": _TASK_THREADS, "memory_limit": None, "death_timeout": start_limit_s}
        worker = {"cls": EmbeddedNanny, "options": common | of_workers}
        scheduler = common | WITHOUT_PAGES | {"dashboard_address": f"{_HOST}:0", "http_prefix": self._token}
        super().__init__(
            workers=dict.fromkeys(range(num_workers), worker),
            worker=worker,
            scheduler={"cls": _PrivateScheduler, "options": scheduler},
            security=security,
        )

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard's first page, with the token."""
        return f"{str(super().dashboard_link).removesuffix('/status')}/{self._token}/status"


class _PrivateScheduler(Scheduler):
    """A scheduler whose dashboard answers only to its own address, with the token (`http_prefix`) in it."""

    def __init__(self, http_prefix: str, **options: Any) -> None:
        self._token = http_prefix
        super().__init__(http_prefix=http_prefix, **options)
        LateDashboard(self, f"/{http_prefix}")

    def start_http_server(self, *arguments: Any, **options: Any) -> None:
        """Start the HTTP server and put `_DashboardGuard` in front of it, before the server answers any request."""
        super().start_http_server(*arguments, **options)
        self.http_server.request_callback = _DashboardGuard(self.http_application, self._token)


class _DashboardGuard(Router):
    """Refuses requests with 403 that another user, or another web page in this user's browser, may have sent.

    A request needs the token as the first part of its path. Its `Host` is of this machine, or the one in Dask's
    `distributed.dashboard.link`, which proxies use; its `Origin`, if it has one, is the page's own.
    """

    def __init__(self, application: web.Application, token: str) -> None:
        self._application = application
        self._refusal = web.Application([(r".*", _Refusal)])
        self._token = token
        self._link = urlsplit(dask.config.get("distributed.dashboard.link"))

    def find_handler(self, request: HTTPServerRequest, **options: Any) -> HTTPMessageDelegate | None:
        """Pass an allowed request on to the dashboard, any other one to a handler that answers 403."""
        is_allowed = self._has_token(request) and self._is_own_host(request) and self._is_own_page(request)
        # Requests that fail are logged, in the job's log as well.
        request.uri = (request.uri or "").replace(self._token, "***")
        return (self._application if is_allowed else self._refusal).find_handler(request, **options)

    def _has_token(self, request: HTTPServerRequest) -> bool:
        first = request.path.removeprefix("/").partition("/")[0]
        return hmac.compare_digest(first.encode(), self._token.encode())

    def _is_own_host(self, request: HTTPServerRequest) -> bool:
        # Tornado 6.2 takes an empty name for that of this machine.
        named = request.headers.get("Host", request.host)
        host = split_host_and_port(named.lower())[0].strip("[]")
        return host in _LOOPBACK or host == self._link.hostname

    def _is_own_page(self, request: HTTPServerRequest) -> bool:
        origin = request.headers.get("Origin")
        own = {request.host, self._link.netloc} - {""}
        return origin is None or urlsplit(origin).netloc in own


class _Refusal(web.RequestHandler):
    def prepare(self) -> None:
        self.set_status(403)
        self.finish("Open the dashboard by the link that lorabatch has printed.\n")
