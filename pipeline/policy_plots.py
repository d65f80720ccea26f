"""Pictures of policies compared on one job: how soon each ends, and how its rows finish over time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..scheduler.policies import PolicyRun


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
    bars = Figure(figsize=(6, 0.5 + 0.4 * len(ordered)))
    axes = bars.subplots()
    axes.barh([run.policy for run in ordered], [run.metrics.makespan_s for run in ordered], color="#4878a8")
    axes.invert_yaxis()
    axes.set_xlabel("seconds until the last row")
    curves = Figure(figsize=(6, 3.6))
    axes = curves.subplots()
    for run in ordered:
        finish_s = np.sort(run.timeline.finish_s[np.isfinite(run.timeline.finish_s)])
        axes.plot(finish_s, np.arange(1, len(finish_s) + 1), label=run.policy)
    axes.set(xlabel="seconds", ylabel="rows finished")
    axes.legend(fontsize=8)
    return [save(bars, "makespan.png"), save(curves, "rows-over-time.png")]
