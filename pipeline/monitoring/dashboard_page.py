"""The page of jobs on the Dask dashboard: a curve per job from its beginning, and tables of jobs, adapters and workers.

It is imported when a browser opens the page. Text from outside is in tables and tooltips only, which show it as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby
from operator import itemgetter
from typing import Any

from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    DataRange1d,
    Div,
    GlobalInlineStyleSheet,
    HoverTool,
    InlineStyleSheet,
    NumeralTickFormatter,
)
from bokeh.palettes import Category10_10
from bokeh.plotting import figure
from jinja2 import Environment

from ...system.untrusted import printable
from .views import JobsView, RunView

_INTERVAL_MS = 1000
# Most rows of a table; a page of more would be slow to replace every second.
_ROWS_SHOWN = 500
_NUMBERS = ("errors", "tokens/s", "tokens in parts", "open rows", "lent", "incoming", "engine restarts")
# Values of a job that have a line of their own below its row.
_NOTES = ("reused", "lost", "output", "message")
# Columns whose text may be broken anywhere, and those whose text stays on one line.
_WRAPS, _WHOLE = ("job", "adapter", "adapters", "in memory of"), (*_NUMBERS, "rows done", "parts", "batch", "pages")
# Time of the browser's zone; the first one with its date and the zone.
_TIMES = """
const two = number => String(number).padStart(2, "0")
const date = new Date(tick)
const time = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":")
if (index > 0) return time
const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-")
const parts = new Intl.DateTimeFormat("en", {timeZoneName: "short"}).formatToParts(date)
return `${time}\\n${day} ${parts.find(part => part.type === "timeZoneName").value}`
"""
_TABLE = Environment(autoescape=True, trim_blocks=True).from_string("""
<h2>{{ title }}</h2>
<table><thead><tr>
{% for name in names %}<th class="{{ 'n' if name in numbers }}">{{ name }}</th>{% endfor %}
</tr></thead>
{% for job, rows in groups %}
<tbody>
{% if has_heads %}
<tr class="head"><td class="name" colspan="{{ names | length }}">
<i style="background: {{ colors[job] }}"></i>{{ job }}</td></tr>
{% endif %}
{% for row in rows %}
<tr>
{% for name in names %}
<td class="{{ 'n' if name in numbers }} {{ 'name' if name in wraps }} {{ 'whole' if name in whole }}">
{%- if name == "job" %}<i style="background: {{ colors[job] }}"></i>{% endif %}
{{- "{:,}".format(row[name]) if name in numbers else row[name] }}</td>
{% endfor %}
</tr>
{% for name in notes if row[name] %}
<tr class="note"><td class="name" colspan="{{ names | length }}">{{ name }}: {{ row[name] }}</td></tr>
{% endfor %}
{% endfor %}
</tbody>
{% endfor %}
</table>
{% if num_more %}<p>and {{ "{:,}".format(num_more) }} more</p>{% endif %}
""")
_STYLE = """
:host { font: 13px/1.35 Helvetica, Arial, sans-serif; color: #1d2430; }
.bk-clearfix { width: 100%; }
h2 { font-size: 13px; margin: 12px 0 2px; color: #444444; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0; }
th { font-weight: normal; color: #5c6470; border-bottom: 1px solid #b8bec8; }
td { font-variant-numeric: tabular-nums; }
tr:not(.note) td { border-top: 1px solid #e3e6eb; }
.name { overflow-wrap: anywhere; }
.n { text-align: right; }
.whole { white-space: nowrap; }
.note td { color: #5c6470; padding-left: 16px; }
.head td { padding-top: 8px; }
i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
p { margin: 2px 0; color: #5c6470; }
"""
# The page of a browser that prefers dark pages: white becomes nearly black, and hues stay.
_DARK = """
@media (prefers-color-scheme: dark) {
  html { background: #ffffff; filter: invert(.9) hue-rotate(180deg); }
}
"""


class JobsPage:
    """One browser's page. `doc`: its Bokeh document."""

    def __init__(self, view: JobsView, doc: Any) -> None:
        self._view = view
        self._lines: dict[str, Any] = {}
        self._colors = cycle(Category10_10)
        self._plot = figure(
            title="generated tokens per second",
            x_axis_type="datetime",
            y_range=DataRange1d(start=0),
            height=260,
            sizing_mode="stretch_width",
            tools="xpan,xbox_zoom,reset,save",
            name="tokens per second",
            stylesheets=[GlobalInlineStyleSheet(css=_DARK)],
        )
        self._plot.xaxis.formatter = CustomJSTickFormatter(code=_TIMES)
        self._plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
        self._losses = ColumnDataSource({"time": [], "tokens_per_s": [], "title": []})
        marks = self._plot.scatter(
            "time", "tokens_per_s", source=self._losses, marker="x", size=12, line_width=3, color="#b42318"
        )
        self._plot.add_tools(HoverTool(renderers=[marks], tooltips=[("worker lost", "@title")]))
        self._tables = {
            name: Div(name=name, sizing_mode="stretch_width", stylesheets=[InlineStyleSheet(css=_STYLE)])
            for name in ("jobs", "adapters", "workers")
        }
        self.update()
        doc.add_periodic_callback(self.update, _INTERVAL_MS)
        for root in (self._tables["jobs"], self._plot, self._tables["adapters"], self._tables["workers"]):
            doc.add_root(root)

    def update(self) -> None:
        """Show curves and tables as they are now."""
        runs = {run.run_id: run for run in self._view.runs}
        for run_id in self._lines.keys() - runs.keys():
            self._forget(run_id)
        for run in reversed(runs.values()):
            self._draw(run)
        losses = [(time_s, worker, run) for run in runs.values() for time_s, worker in run.history.losses]
        self._losses.data = {
            "time": [1000 * time_s for time_s, _, _ in losses],
            "tokens_per_s": [run.history.at(time_s) for time_s, _, run in losses],
            "title": [f"{run.names.name(worker)} of {run.run_id}" for _, worker, run in losses],
        }
        self._fill("jobs", self._view.job_rows())
        self._fill("adapters", self._view.adapter_rows())
        self._fill("workers", self._view.worker_rows())

    def _fill(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        shown = [{key: printable(v) if isinstance(v, str) else v for key, v in r.items()} for r in rows[:_ROWS_SHOWN]]
        # A table of jobs has a row for each; others have the rows of one job after another.
        is_of_jobs = title == "jobs"
        text = _TABLE.render(
            title=title,
            names=[
                name for name in (shown[0] if shown else ()) if name not in _NOTES and (is_of_jobs or name != "job")
            ],
            numbers=_NUMBERS,
            wraps=_WRAPS,
            whole=_WHOLE,
            notes=_NOTES if is_of_jobs else (),
            groups=[(job, list(group)) for job, group in groupby(shown, key=itemgetter("job"))],
            has_heads=not is_of_jobs and len(self._view.runs) > 1,
            colors={run_id: line.glyph.line_color for run_id, line in self._lines.items()},
            num_more=len(rows) - len(shown),
        )
        text = text if shown else ""
        if self._tables[title].text != text:
            self._tables[title].text = text

    def _draw(self, run: RunView) -> None:
        samples = run.history.samples
        data = {"time": [1000 * s for s, _ in samples], "tokens_per_s": [rate for _, rate in samples]}
        if run.run_id in self._lines:
            source = self._lines[run.run_id].data_source
            if source.data["time"] != data["time"]:
                source.data = data
            return
        line = self._plot.line(
            "time",
            "tokens_per_s",
            source=ColumnDataSource(data),
            line_width=2,
            color=next(self._colors),
            name=run.run_id,
        )
        self._lines[run.run_id] = line
        self._plot.add_tools(
            HoverTool(renderers=[line], tooltips=[("job", "$name"), ("tokens/s", "@tokens_per_s{0,0}")])
        )

    def _forget(self, run_id: str) -> None:
        line = self._lines.pop(run_id)
        self._plot.tools = [tool for tool in self._plot.tools if line not in (getattr(tool, "renderers", None) or ())]
        self._plot.renderers = [renderer for renderer in self._plot.renderers if renderer is not line]
