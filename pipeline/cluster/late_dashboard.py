"""`LateDashboard`: stands for Dask's dashboard in an embedded cluster until a browser asks for a page.

The dashboard needs Bokeh, which takes as long to import as all else that a command imports to run a job. Most jobs end
before a page is asked for. `monitoring/scheduler_plugin.py` lists the undocumented names of Dask that both files use.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable

from distributed import Scheduler
from tornado import web

logger = logging.getLogger(__name__)
#: Options of a scheduler that serves no pages by itself.
WITHOUT_PAGES = {"dashboard": False}


class LateDashboard(web.Application):
    """Takes every request for a page that a scheduler started with `WITHOUT_PAGES` does not know.

    The first request adds the dashboard. Without Bokeh, this and later requests find no page. `prefix`: beginning of
    all of the scheduler's paths, such as `/prefix`; "" for none.
    """

    def __init__(self, scheduler: Scheduler, prefix: str = "") -> None:
        self.prefix = prefix
        super().__init__([(r".*", _FirstPage, {"connect": self._connect})])
        self._scheduler = scheduler
        self._add_pages: list[Callable[[], None]] = []
        self._lock = asyncio.Lock()
        scheduler.http_application.add_application(self)

    @classmethod
    def of(cls, scheduler: Scheduler) -> LateDashboard | None:
        """The `LateDashboard` that still stands for the scheduler's dashboard; None if there is none."""
        applications = getattr(scheduler.http_application, "applications", [])
        return next((app for app in applications if isinstance(app, cls)), None)

    def when_connected(self, add_page: Callable[[], None]) -> None:
        """Have `add_page` called when the dashboard has been added."""
        self._add_pages.append(add_page)

    async def _connect(self) -> None:
        scheduler, applications = self._scheduler, self._scheduler.http_application.applications
        async with self._lock:
            if self not in applications:
                return
            try:
                # in a thread: the scheduler goes on meanwhile
                dashboard = await asyncio.to_thread(importlib.import_module, "distributed.dashboard.scheduler")
                dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix=self.prefix)
                for add_page in self._add_pages:
                    add_page()
            except Exception as error:
                logger.warning("the dashboard has no pages: %s", str(error) or type(error).__name__)
            applications.remove(self)


class _FirstPage(web.RequestHandler):
    def initialize(self, connect: Callable[[], Awaitable[None]]) -> None:
        self._connect = connect

    async def get(self) -> None:
        await self._connect()
        # one slash: with two it would name another host
        query = f"?{self.request.query}" if self.request.query else ""
        self.redirect("/" + self.request.path.lstrip("/") + query)
