"""Draws the picture of the README: `python -m lorabatch.benchmarks.speed_picture FILE.svg`.

Each bar is a ratio that `lorabatch bench engine` has measured, the median over systems in turns in one run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_RESULTS = Path(__file__).parent / "results"
_PEFT = "2026-11-22-engine-long-tailed-128-rows-peft-thrice-2-cores"
#: Bar -> file of the result, its workload, and the other system's name in the ratio.
BARS = {
    "PEFT, adapters mixed in a batch": (_PEFT, "long-tailed", "PEFT mixed"),
    "PEFT, one merged adapter after another": (_PEFT, "long-tailed", "PEFT merged"),
    "llama.cpp, adapters in one batch": ("2026-11-25-engine-llamacpp-2-cores", "uniform", "llama.cpp"),
    "OpenVINO GenAI, one adapter after another": ("2026-11-26-engine-eight-adapters-2-cores", "uniform", "OpenVINO"),
}


def ratios() -> dict[str, float]:
    """Bar -> how many times as fast lorabatch is, with adapters unmerged, in fp32."""
    found = {}
    for bar, (file, workload, system) in BARS.items():
        result = json.loads((_RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        found[bar] = float(result["workloads"][workload]["ratios"][f"unmerged against {system}"]["median"])
    return found


def draw(path: Path) -> None:
    """Write the picture as SVG: text as text, and the same bytes from the same results."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed", "font.family": "sans-serif"})
    found = ratios()
    figure = Figure(figsize=(8, 2.4))
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    bars = axes.barh(list(found), list(found.values()), color="#2f6fde", height=0.62)
    axes.bar_label(bars, fmt="%.1f times", padding=5)
    axes.axvline(1, color="#888888", linewidth=1)
    axes.set_xlabel("times as fast as this system")
    axes.margins(x=0.22)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
