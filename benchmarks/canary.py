"""How good the time left is with and without a canary, and what the canary costs: real jobs of unknown lengths.

python -m lorabatch.benchmarks.canary [--jobs 5] [--canary 16] [--save FILE]

Each job draws prompts of the demo's four adapters and of its base model, in shares of its own, at temperature 0.8, so
that answers end when the model ends them; `max_tokens` is 256. Two workers answer them, first without a canary, then
with one. Nothing is known from earlier jobs but what `lorabatch profile` measures. Errors are shares of the job's
seconds, averaged over a part of the job. Two jobs take about two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.jobs.record import JobState
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.planning.profile import profile_model
from lorabatch.pipeline.run import run

MAX_TOKENS = 256
PARTS = ((0.0, 0.1), (0.1, 0.25), (0.0, 0.25), (0.25, 1.0))


class Watcher:
    """A watcher of a run: the times left that it showed, each with the moment."""

    def __init__(self) -> None:
        self._shown: list[tuple[float, float]] = []
        self._began_s = self._ended_s = 0.0

    def update(self, state: JobState) -> None:
        """Keep the time left. A job begins when its rows begin, and ends with its last part."""
        now_s = time.monotonic()
        if state.phase not in ("running", "canary"):
            self._ended_s = self._ended_s if state.phase == "done" else now_s
            return
        self._began_s = self._began_s or now_s
        if state.eta_s is not None:
            self._shown.append((now_s, state.eta_s))

    def note(self, text: str) -> None:
        """Ignore the sentence."""

    def error(self, least: float, most: float) -> float | None:
        """Mean error of the time left in one part of the job, as a share of its seconds; None if none was shown."""
        seconds = self._ended_s - self._began_s
        begin_s, end_s = (self._began_s + share * seconds for share in (least, most))
        errors = [abs(at_s + left_s - self._ended_s) for at_s, left_s in self._shown if begin_s <= at_s < end_s]
        return float(np.mean(errors)) / seconds if errors else None


@dataclass(frozen=True, slots=True)
class Measured:
    """One job, with or without a canary."""

    #: Number of the job.
    job: int
    #: Rows.
    num_rows: int
    #: Rows of each adapter in the canary; 0 without one.
    canary: int
    #: Seconds from the first shard to the last part.
    working_s: float
    #: Mean length of an answer.
    mean_tokens: float
    #: Errors of the time left by the parts of `PARTS`.
    errors: tuple[float | None, ...]


def draw(seed: int, folder: Path) -> tuple[Path, int]:
    """The input of a job of 600 to 1,200 rows, and their number."""
    generator = np.random.default_rng(seed)
    rows = pq.read_table(DEMO_FOLDER / "prompts.parquet").select(["adapter", "messages"]).to_pylist()
    names = sorted({row["adapter"] or "" for row in rows})
    shares = generator.dirichlet(np.ones(len(names)))
    num_rows = int(generator.integers(600, 1200))
    by_name = {name: [row for row in rows if (row["adapter"] or "") == name] for name in names}
    drawn = [by_name[names[i]] for i in generator.choice(len(names), num_rows, p=shares)]
    given = [{**of_name[generator.integers(len(of_name))], "id": str(i)} for i, of_name in enumerate(drawn)]
    path = folder / f"input-{seed}.parquet"
    pq.write_table(pa.Table.from_pylist(given), path)
    return path, num_rows


def measure(seed: int, canary: int, model: Path, cost_model: Path, folder: Path) -> Measured:
    """Run one job."""
    path, num_rows = draw(seed, folder)
    watcher = Watcher()
    os.environ["LORABATCH_HISTORY"] = str(folder / f"history-{seed}-{canary}")
    result = run(
        JobSpec(
            model=str(model),
            adapters=str(DEMO_FOLDER / "adapters"),
            input=str(path),
            output=str(folder / f"output-{seed}-{canary}"),
            cost_model=str(cost_model),
            temperature=0.8,
            max_tokens=MAX_TOKENS,
            canary=canary or None,
            workers=2,
        ),
        progress=watcher,
    )
    assert result.num_errors == 0, result
    assert result.working_s is not None
    errors = tuple(watcher.error(*part) for part in PARTS)
    return Measured(seed, num_rows, canary, result.working_s, result.completion_tokens / num_rows, errors)


def line(without: Measured, with_canary: Measured) -> str:
    """A row of the table."""
    pairs = zip(without.errors, with_canary.errors, strict=True)
    shown = " | ".join(" → ".join("" if error is None else f"{error:.0%}" for error in pair) for pair in pairs)
    cost = with_canary.working_s / without.working_s - 1
    return f"| {without.num_rows} | {without.mean_tokens:.0f} | {without.working_s:.0f} | {cost:+.1%} | {shown} |"


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.canary", description=__doc__)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--canary", type=int, default=16)
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    model, found = base_model_folder(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        _, cost_model = profile_model(JobSpec(model=str(model), input="-", output="-"), 60.0, folder / "profile.json")
        parts = [f"{least:.0%} to {most:.0%}" for least, most in PARTS]
        print(
            f"| rows | tokens | seconds | with canary | {' | '.join(parts)} |",
            "|---:" * (4 + len(parts)) + "|",
            sep="\n",
        )
        for seed in range(chosen.jobs):
            pair = [measure(seed, canary, model, cost_model, folder) for canary in (0, chosen.canary)]
            print(line(*pair), flush=True)
            found += pair
    for part, share in enumerate(PARTS):
        means = [
            np.mean([error for one in found if bool(one.canary) is has and (error := one.errors[part]) is not None])
            for has in (False, True)
        ]
        print(f"mean error, {share[0]:.0%} to {share[1]:.0%}: {means[0]:.1%} → {means[1]:.1%}")
    if chosen.save:
        facts = {"jobs": [asdict(one) for one in found], **provenance(("torch", "dask", "pyarrow"))}
        chosen.save.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
