"""One repeated experiment: what was varied, what each policy got, and what the paper says about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True, slots=True)
class Claim:
    """One comparison the paper makes: `worse` over `better` reaches `paper_ratio` (None: an ordering only).

    `higher_is_better` turns the ratio round (throughput). The ratio is the largest over the points.
    """

    better: str
    worse: str
    paper_ratio: float | None
    metric: str
    higher_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """`values[metric][policy]`: one number per point of `points`. `note`: why ours may differ."""

    name: str
    title: str
    x_label: str
    points: tuple[float, ...]
    values: dict[str, dict[str, list[float]]]
    claims: tuple[Claim, ...]
    note: str

    def ratio(self, claim: Claim) -> float:
        """Our largest ratio over the points where both are finite and above zero."""
        worse, better = (self.values[claim.metric][name] for name in (claim.worse, claim.better))
        if claim.higher_is_better:
            worse, better = better, worse
        ratios = [w / b for w, b in zip(worse, better, strict=True) if 0 < b < float("inf") and w < float("inf")]
        return max(ratios, default=float("nan"))

    def agreement(self, claim: Claim) -> str:
        """On how many points the better policy is at least as good (2 % counts as equal)."""
        worse, better = (self.values[claim.metric][name] for name in (claim.worse, claim.better))
        if claim.higher_is_better:
            worse, better = better, worse
        holds = sum(b <= w * 1.02 for w, b in zip(worse, better, strict=True))
        if holds < len(better):
            return f"on {holds} of {len(better)} points"
        return "yes" if any(w > b * 1.02 for w, b in zip(worse, better, strict=True)) else "no difference"

    def plot(self, folder: Path) -> list[str]:
        """One picture per metric; returns the file names."""
        names: list[str] = []
        for metric, of_policy in self.values.items():
            figure, axes = pyplot.subplots(figsize=(5, 3.2))
            for policy, numbers in of_policy.items():
                axes.plot(self.points, numbers, marker="o", label=policy)
            axes.set(xlabel=self.x_label, ylabel=metric, title=self.title)
            if max(map(_top, of_policy.values())) > 20 * max(1e-9, min(map(_low, of_policy.values()))):
                axes.set_yscale("log")
            axes.legend(fontsize=8)
            figure.tight_layout()
            names.append(f"{self.name.lower().replace(' ', '-').replace('.', '')}-{len(names)}.png")
            figure.savefig(folder / names[-1], dpi=110)
            pyplot.close(figure)
        return names


def _top(numbers: list[float]) -> float:
    return max((n for n in numbers if n < float("inf")), default=0.0)


def _low(numbers: list[float]) -> float:
    return min((n for n in numbers if n > 0), default=1.0)
