"""The page of jobs on the Dask dashboard, drawn by Bokeh: a curve per job from its beginning, and two tables.

It is imported when a browser opens the page. Text from outside is in tables and legends only, which show it as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import CDSView, ColumnDataSource, CustomJS, DataRange1d, DataTable, HoverTool, Legend, LegendItem
from bokeh.palettes import Category10_10
from bokeh.plotting import figure

from ...jobs.report.tables import TableField, table_columns
from .views import JobsView, RunView

_INTERVAL_MS = 1000
_ROW_PX = 25
# Column -> its width in pixels; tables that are wider than the window scroll.
_JOBS = {
    "job": 260, "phase": 100, "rows": 330, "errors": 50, "parts": 80, "left": 220, "tokens/s": 60, "lost": 230,
    "output": 260, "message": 400,
}  # fmt: skip
_WORKERS = {
    "worker": 170, "job": 260, "state": 70, "tokens/s": 60, "batch": 70, "open rows": 75, "lent": 45, "incoming": 70,
    "mode": 75, "prompt reused": 100, "pages": 110, "engine restarts": 110, "adapters": 300,
}  # fmt: skip


class JobsPage:
    """One browser's page. `doc`: its Bokeh document."""

    def __init__(self, view: JobsView, doc: Any) -> None:
        self._view = view
        self._lines: dict[str, Any] = {}
        self._plot = figure(
            title="generated tokens per second",
            x_axis_type="datetime",
            y_range=DataRange1d(start=0),
            height=260,
            sizing_mode="stretch_width",
            tools="xpan,xbox_zoom,reset,save",
            name="tokens per second",
        )
        self._losses = ColumnDataSource({"time": [], "tokens_per_s": [], "title": []})
        marks = self._plot.scatter(
            "time", "tokens_per_s", source=self._losses, marker="x", size=12, line_width=3, color="#b42318"
        )
        self._plot.add_tools(HoverTool(renderers=[marks], tooltips=[("", "@title")]))
        self._lost = LegendItem(label="worker lost", renderers=[marks])
        self._legend = Legend(items=[self._lost], ncols=3, click_policy="hide", location="left")
        self._plot.add_layout(self._legend, "below")
        self._jobs, self._workers = _table(_JOBS, "jobs"), _table(_WORKERS, "workers")
        self.update()
        doc.add_periodic_callback(self.update, _INTERVAL_MS)
        for root in (self._plot, self._jobs, self._workers):
            doc.add_root(root)

    def update(self) -> None:
        """Show curves and tables as they are now."""
        runs = {run.run_id: run for run in self._view.runs}
        for run_id in self._lines.keys() - runs.keys():
            self._forget(run_id)
        for run in reversed(runs.values()):
            self._draw(run)
        losses = [(time_s, worker, run) for run in runs.values() for time_s, worker in run.history.losses]
        self._lost.visible = bool(losses)
        self._losses.data = {
            "time": [1000 * time_s for time_s, _, _ in losses],
            "tokens_per_s": [run.history.at(time_s) for time_s, _, run in losses],
            "title": [f"{run.names.name(worker)} of {run.run_id}" for _, worker, run in losses],
        }
        _fill(self._jobs, _JOBS, self._view.job_rows())
        _fill(self._workers, _WORKERS, self._view.worker_rows())

    def _draw(self, run: RunView) -> None:
        samples = run.history.samples
        data = {"time": [1000 * s for s, _ in samples], "tokens_per_s": [rate for _, rate in samples]}
        if run.run_id in self._lines:
            source = self._lines[run.run_id].data_source
            if source.data["time"] != data["time"]:
                source.data = data
            return
        color = Category10_10[len(self._lines) % len(Category10_10)]
        line = self._plot.line(
            "time", "tokens_per_s", source=ColumnDataSource(data), line_width=2, color=color, name=run.run_id
        )
        self._lines[run.run_id] = line
        self._plot.add_tools(
            HoverTool(renderers=[line], tooltips=[("job", "$name"), ("tokens/s", "@tokens_per_s{0,0}")])
        )
        self._legend.items = [*self._legend.items, LegendItem(label={"value": run.run_id}, renderers=[line])]

    def _forget(self, run_id: str) -> None:
        line = self._lines.pop(run_id)
        self._legend.items = [item for item in self._legend.items if line not in item.renderers]
        self._plot.tools = [tool for tool in self._plot.tools if line not in (getattr(tool, "renderers", None) or ())]
        self._plot.renderers = [renderer for renderer in self._plot.renderers if renderer is not line]


def _table(widths: Mapping[str, int], name: str) -> DataTable:
    fields = [TableField(title, width=width) for title, width in widths.items()]
    source, view = ColumnDataSource({title: [] for title in widths}), CDSView()
    # The table reads its data again when its view changes, which other values in the same number of rows do not cause.
    source.js_on_change("data", CustomJS(args={"view": view}, code="view.change.emit()"))
    return DataTable(
        source=source,
        view=view,
        columns=table_columns(fields),
        index_position=None,
        autosize_mode="none",
        reorderable=False,
        sizing_mode="stretch_width",
        height=_ROW_PX,
        name=name,
    )


def _fill(table: DataTable, titles: Mapping[str, int], rows: Sequence[Mapping[str, Any]]) -> None:
    data = {title: [row[title] for row in rows] for title in titles}
    if data != table.source.data:
        table.source.data = data
        table.height = _ROW_PX * (len(rows) + 1) + 24  # a scrollbar below
