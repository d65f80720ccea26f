"""Pictures of policies compared on one job: how soon each ends, and how its rows finish over time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..scheduler.policies import PolicyRun

_LINES = (("-", 4.0), ("-", 2.5), ("--", 1.8), (":", 1.8), ("-.", 1.2), ("-", 1.0))


def plot_runs(runs: Sequence[PolicyRun], folder: Path) -> list[str]:
    """Write the pictures into `folder`; their names. Empty without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def save(figure: Figure, name: str) -> str:
        FigureCanvasAgg(figure)
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        return name

    ordered = sorted(runs, key=lambda run: run.metrics.makespan_s)
    bars = Figure(figsize=(7, 0.8 + 0.4 * len(ordered)))
    axes = bars.subplots()
    drawn = axes.barh([run.policy for run in ordered], [run.metrics.makespan_s for run in ordered], color="#2f6fde")
    axes.bar_label(drawn, fmt="%.1f", padding=4, fontsize=9)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel("seconds until the last row")
    axes.spines[["top", "right"]].set_visible(False)
    curves = Figure(figsize=(7, 4))
    axes = curves.subplots()
    for place, run in enumerate(ordered):
        finish_s = np.sort(run.timeline.finish_s[np.isfinite(run.timeline.finish_s)])
        # Policies that do the same lie on one line: wide solid ones below, narrow broken ones above, so that all show.
        style, width = _LINES[min(place, len(_LINES) - 1)]
        axes.plot(finish_s, np.arange(1, len(finish_s) + 1), label=run.policy, linestyle=style, linewidth=width)
    axes.set(xlabel="seconds", ylabel="rows finished", xlim=(0, None), ylim=(0, None))
    axes.grid(color="#dfe3ea", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return [save(bars, "makespan.png"), save(curves, "rows-over-time.png")]
