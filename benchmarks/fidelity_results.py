"""The section on predicted and measured seconds, from a file that `benchmarks.fidelity` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Predicted and measured seconds of one job."""

    #: Name of the job in the table.
    job: str
    #: Rows of the job.
    num_rows: int
    #: Prompt tokens of all rows.
    prompt_tokens: int
    #: Tokens of all answers.
    output_tokens: int
    #: Predicted seconds from the first shard opened to the last part written.
    predicted_s: float
    #: Measured seconds of the same span.
    measured_s: float
    #: Whether the prediction knew the lengths of the answers.
    has_lengths: bool = True

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one; negative where the job took longer than predicted."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class FidelityResults:
    """Content of one result file: jobs that were planned and run."""

    #: Name of the file.
    name: str
    #: Workers, machine, model and date, as one text.
    facts: str
    #: Kind of step -> `r_squared` and `median_error` of the cost model's fit.
    quality: Mapping[str, Mapping[str, float]]
    #: Jobs in the order of the file.
    jobs: Sequence[Fidelity]
    #: Sentences that were added to the file by hand and end the section; empty for none.
    remark: str = ""

    @classmethod
    def read(cls, path: Path) -> FidelityResults:
        """The file's content."""
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        facts = f"{raw['workers']} workers, {raw['machine']}, {raw['model']}, {raw['date']}"
        jobs = [Fidelity(**job) for job in raw["jobs"]]
        return cls(path.name, facts, raw["profile"]["quality"], jobs, raw.get("remark", ""))

    @classmethod
    def newest(cls, folder: Path = RESULTS) -> FidelityResults | None:
        """The latest file by name, if there is one."""
        found = sorted(folder.glob("*-fidelity-*.json"))
        return cls.read(found[-1]) if found else None

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors over jobs with known lengths, as a share."""
        errors = [abs(job.error) for job in self.jobs if job.has_lengths]
        return sum(errors) / len(errors)

    def to_lines(self) -> list[str]:
        """The section, in Markdown."""
        fits = ", ".join(
            f"{kind} R² {found['r_squared']:.2f} (median error {found['median_error']:.0%})"
            for kind, found in self.quality.items()
        )
        return [
            "## Fidelity: predicted and measured",
            "",
            "Jobs planned with a cost model from `lorabatch profile` and then run for real",
            f"({self.facts}): seconds from the first shard opened to the last part written. Lengths of answers are",
            "known unless a job says otherwise, so that what differs is the model of engine and cluster; where they",
            "are not, half of `max_tokens` is assumed. Plans are made before the runs; “as they came” is a prediction",
            "afterwards, with the answers' own lengths. `python -m lorabatch.benchmarks.fidelity` repeats it",
            f"(`benchmarks/results/{self.name}`). The cost model's fit: {fits}.",
            "",
            "| job | rows | prompt tokens | output tokens | predicted, s | measured, s | error |",
            "|---|---|---|---|---|---|---|",
            *map(_line, self.jobs),
            "",
            f"Mean absolute error of the jobs with known lengths: {self.mean_error:.1%}.",
            *([self.remark] if self.remark else []),
            "",
        ]


def _line(job: Fidelity) -> str:
    name = job.job if job.has_lengths else f"{job.job}, lengths unknown"
    counts = f"{job.num_rows} | {job.prompt_tokens} | {job.output_tokens}"
    return f"| {name} | {counts} | {job.predicted_s:.1f} | {job.measured_s:.1f} | {job.error:+.1%} |"
