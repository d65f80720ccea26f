"""`JobsPlugin`: shows jobs on the Dask dashboard (`/lora`, `/lora.json`, `/lora/metrics`), and `JobAdaptive`, which
scales a cluster with their backlog: `cluster.adapt(Adaptive=JobAdaptive, …)`.

The file uses undocumented parts of Dask's dashboard, and its test says what is relied on: `scheduler.http_application`,
its `add_handlers` and `add_application`, and the list of pages in `template_variables`. Without Bokeh only the page is
missing; without the dashboard jobs still run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from distributed import Client, Scheduler
from distributed.deploy.adaptive import Adaptive
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado import web
from tornado.ioloop import IOLoop

from ...version import __version__
from ..cluster.late_dashboard import LateDashboard
from ..messages import JOB_PREFIX, CoordinatorStarted
from .topics import CONTROL, REPORTS, STATES
from .views import JobsView

logger = logging.getLogger(__name__)
PAGE = "lora"
# The scheduler's operation that `JobAdaptive` calls.
WANTED_OP = "lorabatch_wanted_workers"
# Full batches of unfinished rows that justify a worker: fewer are answered before it has started.
BATCHES_PER_WORKER = 4.0


class JobsPlugin(SchedulerPlugin):
    """Shows states and reports that coordinators and workers publish, and protects busy workers when the cluster
    shrinks.
    """

    name = f"lorabatch-jobs-{__version__}"
    # Each job registers the plugin again, which must not forget published states and reports.
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Add the page, its JSON and its metrics to the dashboard. Dask calls this on the scheduler."""
        self.view = JobsView()
        scheduler.handlers[WANTED_OP] = _wanted_workers_of(scheduler, self.view)
        try:
            _add_answers(scheduler, self.view)
            if (late := LateDashboard.of(scheduler)) is not None:
                late.when_connected(partial(_add_page, scheduler, self.view))
            else:
                _add_page(scheduler, self.view)
        except Exception as error:
            logger.warning("the dashboard has no page about jobs: %s", str(error) or type(error).__name__)

    def log_event(self, topic: str, msg: Any) -> None:
        """Take in states, reports and beginnings of coordinators. Dask calls this for every event of every topic."""
        if (run_id := STATES.run_of(topic)) is not None:
            self.view.state_published(run_id, STATES.codec.decode(msg))
        elif (run_id := REPORTS.run_of(topic)) is not None:
            self.view.reported(run_id, REPORTS.codec.decode(msg))
        elif (run_id := CONTROL.run_of(topic)) and isinstance(CONTROL.codec.decode(msg), CoordinatorStarted):
            self.view.coordinator_started(run_id)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Workers that may be retired, since their engines have no rows."""
        busy = self.view.busy_workers()
        return [worker for worker in workers if worker.address not in busy]

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Note that a worker has left. Dask calls this on the scheduler."""
        self.view.lost(worker, time.time())


def show_jobs(client: Client) -> None:
    """Have the cluster's dashboard show jobs of lorabatch. A failure is only logged."""
    try:
        client.register_plugin(JobsPlugin())
    except Exception as error:
        logger.warning("the dashboard has no page about jobs: %s", str(error) or type(error).__name__)


def _wanted_workers_of(scheduler: Scheduler, view: JobsView) -> Callable[[float], Coroutine[Any, Any, int]]:
    async def wanted(batches_per_worker: float) -> int:
        over = ("memory", "erred", "released")
        unfinished = [str(key) for key, task in scheduler.tasks.items() if task.state not in over]
        return wanted_workers(
            rows_left=sum(run.rows_left for run in view.runs),
            batch_rows=max((report.batch_rows for run in view.runs for report in run.reports.values()), default=1),
            num_jobs=sum(key.startswith(JOB_PREFIX) for key in unfinished),
            batches_per_worker=batches_per_worker,
        )

    return wanted


class _Answer(web.RequestHandler):
    def initialize(self, render: Callable[[], Any], content_type: str) -> None:
        self._render = render
        self._content_type = content_type

    def get(self) -> None:
        self.set_header("Content-Type", self._content_type)
        self.write(self._render())


def _add_answers(scheduler: Scheduler, view: JobsView) -> None:
    prefix = _prefix(scheduler)
    text = "text/plain; version=0.0.4; charset=utf-8"
    answers = [
        (rf"{prefix}/{PAGE}\.json", _Answer, {"render": view.to_json, "content_type": "application/json"}),
        (rf"{prefix}/{PAGE}/metrics", _Answer, {"render": view.to_prometheus, "content_type": text}),
    ]
    scheduler.http_application.add_handlers(r".*", answers)


def _add_page(scheduler: Scheduler, view: JobsView) -> None:
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables

    variables = template_variables(scheduler)
    pages = {f"/{PAGE}": partial(_document, view)}
    application = BokehApplication(pages, scheduler, prefix=_prefix(scheduler), template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
    if PAGE not in variables["pages"]:
        # All of Dask's pages share the list, so that their menus gain a tab.
        variables["pages"].append(PAGE)


def _prefix(scheduler: Scheduler) -> str:
    """Beginning of all of the dashboard's paths (`dask scheduler --dashboard-prefix`); "" by default."""
    applications = getattr(scheduler.http_application, "applications", [])
    return next((str(app.prefix) for app in applications if getattr(app, "prefix", "")), "")


def _document(view: JobsView, scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill one browser's page and keep it fresh."""
    from distributed.dashboard.components.scheduler import env

    from .dashboard_page import JobsPage

    JobsPage(view, doc)
    doc.title = "lorabatch"
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


class JobAdaptive(Adaptive):
    """Scales a cluster to one worker for each `batches_per_worker` full batches of rows that are left, between
    `minimum` and `maximum`.

    `JobsPlugin` on the scheduler counts the rows and protects workers whose engines have some.
    """

    def __init__(self, *args: Any, batches_per_worker: float = BATCHES_PER_WORKER, **options: Any) -> None:
        self._batches_per_worker = batches_per_worker
        super().__init__(*args, **options)

    async def target(self) -> int:
        """Workers wanted now; 0 before the first job, which sets up `JobsPlugin`."""
        try:
            wanted = await getattr(self.scheduler, WANTED_OP)(batches_per_worker=self._batches_per_worker)
        except OSError as error:
            logger.warning("no reply of the scheduler about the workers it wants: %s", error)
            return len(self.plan)
        # Dask replies with a string when its scheduler serves no such operation.
        return wanted if isinstance(wanted, int) else 0


def wanted_workers(rows_left: int, batch_rows: int, num_jobs: int, batches_per_worker: float) -> int:
    """Number of workers for `rows_left` rows without an answer: one for each `batches_per_worker` batches of
    `batch_rows` rows, at least one if there is a job, for its coordinator. `num_jobs`: unfinished jobs, including those
    not started yet.
    """
    if num_jobs == 0:
        return 0
    return max(1, -int(-rows_left // max(1.0, batch_rows * batches_per_worker)))
