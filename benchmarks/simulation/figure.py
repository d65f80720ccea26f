"""One repeated experiment of a paper: what was varied, what each policy got, and what the paper claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# Student's t, 97.5 %, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True)
class Claim:
    """One comparison of two policies: the metric's ratio of `worse` over `better` reaches `paper`."""

    #: Policy that is claimed to be better.
    better: str
    #: Policy with which it is compared.
    worse: str
    #: Ratio as the paper prints it, `ordering` where it gives an order only, `-` or empty where it gives neither.
    paper: str
    #: Metric that is compared, a key of `Figure.values`.
    metric: str
    #: Whether higher values are better, as of throughput; the ratio is then `better` over `worse`.
    higher_is_better: bool = False
    #: Least value of the better policy; a point with a smaller one at some seed gives no ratio.
    least: float = 0.0
    #: Whether the claim is that the two are equal.
    is_parity: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a paper, repeated with one seed."""

    #: Paper, number of the figure, and what was changed, if anything.
    name: str
    #: Name of the quantity that is varied.
    x_label: str
    #: Values of this quantity.
    points: tuple[float, ...]
    #: Metric -> policy -> one number per point.
    values: dict[str, dict[str, list[float]]]
    #: Comparisons of policies in this figure.
    claims: tuple[Claim, ...] = ()

    def at(self, points: Sequence[float]) -> Figure:
        """The figure with no other points than `points`, which it must have."""
        kept = [self.points.index(point) for point in points]
        values = {
            metric: {policy: [numbers[i] for i in kept] for policy, numbers in of_policy.items()}
            for metric, of_policy in self.values.items()
        }
        return replace(self, points=tuple(points), values=values)

    def ratios(self, claim: Claim) -> NDArray[np.float64]:
        """Worse over better, `[num_points]`; NaN where it says nothing."""
        worse, better = (np.array(self.values[claim.metric][name]) for name in (claim.worse, claim.better))
        over, under = (better, worse) if claim.higher_is_better else (worse, better)
        is_sound = np.isfinite(worse) & np.isfinite(better) & (under > 0) & (better >= claim.least)
        return np.where(is_sound, over / np.where(is_sound, under, 1.0), np.nan)


@dataclass(frozen=True, slots=True)
class Interval:
    """Geometric mean of a ratio over seeds, and its 95 % t-interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: NDArray[np.float64]) -> Interval:
        """`[num_seeds]`, at least two."""
        logs = np.log(ratios)
        half = _T[len(logs) - 1] * float(logs.std(ddof=1)) / np.sqrt(len(logs))
        return cls(*(float(np.exp(logs.mean() + shift)) for shift in (0.0, -half, half)))

    @property
    def verdict(self) -> str:
        """Whether the better policy is better: yes, same (the interval holds 1) or no."""
        if self.low <= 1.0 <= self.high:
            return "same"
        return "yes" if self.low > 1.0 else "no"

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim over seeds. `whole`: of the geometric mean over the points that are used, None without any. `by_point`:
    of each point, None where a ratio says nothing.
    """

    claim: Claim
    points: tuple[float, ...]
    whole: Interval | None
    by_point: tuple[Interval | None, ...]

    @classmethod
    def of(cls, figures: Sequence[Figure], claim: Claim) -> Finding:
        """`figures`: the same one of each seed."""
        ratios = np.array([figure.ratios(claim) for figure in figures])  # [num_seeds, num_points]
        is_used = np.isfinite(ratios).all(axis=0)
        whole = Interval.of(np.exp(np.log(ratios[:, is_used]).mean(axis=1))) if is_used.any() else None
        by_point = tuple(
            Interval.of(column) if used else None for column, used in zip(ratios.T, is_used.tolist(), strict=True)
        )
        return cls(claim, figures[0].points, whole, by_point)

    @property
    def verdict(self) -> str:
        """Verdict on `whole`: yes, same, no, or no ratio. A claim of parity holds unless the interval is below 1."""
        if self.whole is None:
            return "no ratio"
        if self.claim.is_parity:
            return "no" if self.whole.verdict == "no" else "yes"
        return self.whole.verdict

    @property
    def largest(self) -> str:
        """The point with the largest ratio, in which papers give theirs."""
        found = [(one.mean, number) for number, one in enumerate(self.by_point) if one is not None]
        if not found:
            return "-"
        number = max(found)[1]
        return f"{self.by_point[number]} at {self.points[number]:.3g}"

    @property
    def points_by_verdict(self) -> str:
        """How many points say what."""
        said = [one.verdict if one is not None else "no ratio" for one in self.by_point]
        return ", ".join(f"{said.count(word)} {word}" for word in ("yes", "same", "no", "no ratio") if word in said)
