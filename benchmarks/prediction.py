"""Predicted against measured on jobs that no parameter was fitted to: what `plan` says, and what the run takes.

python -m lorabatch.benchmarks.prediction [--cost-model PROFILE.json] [--job NUMBER …] [--save FILE]

Real jobs on two local workers with the demo's base model: long prompts, one row, 300 adapters, one worker four times
slower, answers of unknown length, and machines without a profile, with and without an earlier job. Without
`--cost-model` the machine is measured first. All of it takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from lorabatch.benchmarks.fidelity import RANKS, JobMix, prepared, rows_between
from lorabatch.benchmarks.provenance import commit, cpu_name
from lorabatch.benchmarks.slow_worker_bench import one_slowed
from lorabatch.demo.base_model import base_model_folder
from lorabatch.demo.job import DEMO_FOLDER
from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.jobs.record import JobState
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.planning.dry_run import dry_run
from lorabatch.pipeline.planning.profile import profile_model
from lorabatch.pipeline.run import run

# Source of what the plan knows beforehand: a profile, nothing, or the history that the job before has left.
Knows = Literal["profile", "nothing", "the job before"]
_COLUMNS = (
    "job",
    "costs known by",
    "lengths known",
    "predicted, s",
    "after first steps, s",
    "measured, s",
    "error",
    "bound, s",
    "measured over bound",
    "ranges that held",
)
_HEADER = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"
_MANY, _SLOWNESS, _DEMO_ROWS = 300, 4.0, 96
_UNMERGED = (("mode", "unmerged"),)
_ALONE = (("workers", 1), ("engine_threads", 2))


@dataclass(frozen=True, slots=True)
class Case:
    """One job. `mix` None: prompts of the demo, whose answers end when the model ends them."""

    mix: JobMix | None
    knows: Knows = "profile"
    has_slow_worker: bool = False
    name: str = ""

    @property
    def title(self) -> str:
        """Name of the case in the table."""
        return self.name or (self.mix.name if self.mix else "")


class Ranges:
    """A watcher of a run: the ranges in which it was to end, and whether it did."""

    def __init__(self) -> None:
        self._told: list[tuple[float, float]] = []
        self._ended_s = 0.0

    def update(self, state: JobState) -> None:
        """Keep the predicted range of end times while the job runs, and the time of the last update before `done`."""
        now_s = time.monotonic()
        if state.phase != "running":
            self._ended_s = self._ended_s if state.phase == "done" else now_s
        elif state.eta_range_s is not None and state.rows_done:
            self._told.append((now_s + state.eta_range_s[0], now_s + state.eta_range_s[1]))

    def note(self, text: str) -> None:
        """Ignore the sentence."""

    @property
    def share_held(self) -> float | None:
        """Share of the ranges since the first answer that contain the job's end; None without any range."""
        held = [least_s <= self._ended_s <= most_s for least_s, most_s in self._told]
        return sum(held) / len(held) if held else None


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted and measured seconds of one case."""

    #: Title of the case in the table.
    name: str
    #: Source of what the plan knew beforehand.
    knows: Knows
    #: Whether the lengths of answers were given by the job.
    has_lengths: bool
    #: Seconds that the plan predicted.
    predicted_s: float
    #: Seconds predicted again from the first steps; None unless the plan's costs were a guess.
    corrected_s: float | None
    #: Seconds from the first shard opened to the last part written.
    measured_s: float
    #: Seconds below which no scheduler could have answered the rows; None: not known.
    bound_s: float | None
    #: `Ranges.share_held` of the run.
    share_held: float | None

    @property
    def error(self) -> float:
        """Last prediction over measured seconds, less one."""
        return (self.corrected_s or self.predicted_s) / self.measured_s - 1

    def to_line(self) -> str:
        """A row of the table."""
        corrected = f"{self.corrected_s:.1f}" if self.corrected_s else ""
        bound = f"{self.bound_s:.1f} | {self.measured_s / self.bound_s:.2f}" if self.bound_s else "not known |"
        seconds = f"{self.predicted_s:.1f} | {corrected} | {self.measured_s:.1f} | {self.error:+.1%}"
        held = "" if self.share_held is None else f"{self.share_held:.0%}"
        return f"| {self.name} | {self.knows} | {'yes' if self.has_lengths else 'no'} | {seconds} | {bound} | {held} |"


def _one_row_each(generator: np.random.Generator) -> list[tuple[int, int, int]]:
    return [(int(generator.integers(16, 48)), int(generator.integers(8, 24)), i) for i in range(_MANY)]


_ZIPF = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7)
_PLAIN = rows_between(120, (16, 64), (16, 48), (0, 1, 2, -1))
CASES = (
    Case(JobMix("base model, short answers", rows_between(200, (8, 64), (4, 48), (-1,)))),
    Case(JobMix("one row", rows_between(1, (60, 61), (100, 101), (0,)))),
    Case(JobMix("prompts longer than a step", rows_between(20, (550, 900), (4, 24), (0, 4)), _UNMERGED)),
    Case(JobMix("prompts of 10 to 400 tokens", rows_between(60, (10, 400), (8, 40), (1, 2, 5)))),
    Case(JobMix("8 adapters, Zipf", rows_between(160, (16, 64), (16, 40), _ZIPF))),
    Case(JobMix("300 adapters", _one_row_each)),
    Case(JobMix("few rows, long answers", rows_between(12, (16, 32), (40, 200), (2, 7, -1)))),
    Case(JobMix("two adapters, merged", rows_between(160, (16, 64), (16, 40), (2, 3)), (("mode", "merged"),))),
    Case(JobMix("one worker 4 times slower", _PLAIN), has_slow_worker=True),
    Case(JobMix("no profile, one worker of two threads", _PLAIN, _ALONE), "nothing"),
    Case(JobMix("no profile, long prompts", rows_between(40, (200, 400), (8, 40), (1, 2)), _ALONE), "the job before"),
    Case(None, "profile", name="the demo's prompts, lengths unknown"),
    Case(None, "the job before", name="the same, with the lengths of the job before"),
)


def measure(case: Case, model: Path, adapters: Path, cost_model: Path, folder: Path) -> Predicted:
    """Plan a job, run it, compare. What the job before has kept is in `LORABATCH_HISTORY`."""
    if case.mix is None:
        options: dict[str, Any] = _demo_options(model, folder) | {"cost_model": str(cost_model)}
    else:
        options, drawn = prepared(case.mix, model, adapters, folder)
        if max(adapter for _, _, adapter in drawn) >= len(RANKS):
            options["adapters"] = str(_write_adapters(folder / "adapters", model, [2] * _MANY))
        if case.knows == "profile":
            options["cost_model"] = str(cost_model)
    ranges = Ranges()
    speeds = f"1,{1 / _SLOWNESS}" if case.has_slow_worker else None
    predicted_s = dry_run(options, speeds=speeds).forecast.predicted_s
    with one_slowed(_SLOWNESS) if case.has_slow_worker else contextlib.nullcontext():
        result = run(JobSpec(**options), progress=ranges)
    assert result.num_errors == 0, result
    assert result.working_s is not None
    known = case.mix is not None
    return Predicted(
        case.title,
        case.knows,
        known,
        predicted_s,
        result.corrected_s,
        result.working_s,
        result.bound_s,
        ranges.share_held,
    )


def _write_adapters(folder: Path, model: Path, ranks: Sequence[int]) -> Path:
    for i, rank in enumerate(ranks):
        write_random_adapter(folder / f"a{i}", read_model_config(model), rank, seed=i)
    return folder


def _demo_options(model: Path, folder: Path) -> dict[str, Any]:
    rows = pq.read_table(DEMO_FOLDER / "prompts.parquet")
    every = rows.num_rows // _DEMO_ROWS
    pq.write_table(rows.take(list(range(0, every * _DEMO_ROWS, every))), folder / "input.parquet")
    return {
        "model": str(model),
        "adapters": str(DEMO_FOLDER / "adapters"),
        "row_settings": ["max_tokens"],
        "input": str(folder / "input.parquet"),
        "output": str(folder / "output"),
        "workers": 2,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.prediction", description=__doc__)
    parser.add_argument("--cost-model", type=Path, help="file of `lorabatch profile`; by default measured first")
    parser.add_argument("--job", type=int, nargs="*", default=range(len(CASES)), help="numbers, all by default")
    parser.add_argument("--save", type=Path, help="JSON file")
    chosen = parser.parse_args()
    model = base_model_folder()
    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        # Profiles of this machine count as little as jobs that ran here before.
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        os.environ["LORABATCH_HISTORY"] = str(root / "history")
        cost_model = chosen.cost_model
        if cost_model is None:
            spec = JobSpec(model=str(model), input="-", output="-")
            _, cost_model = profile_model(spec, 60.0, root / "profile.json")
        adapters = _write_adapters(root / "adapters", model, RANKS)
        print(_HEADER, flush=True)
        for number in chosen.job:
            case = CASES[number]
            if case.knows == "nothing":
                os.environ["LORABATCH_HISTORY"] = str(root / f"history-{number}")
            folder = root / str(number)
            folder.mkdir()
            found.append(measure(case, model, adapters, cost_model, folder))
            print(found[-1].to_line(), flush=True)
    if chosen.save:
        facts = {"date": datetime.now(UTC).date().isoformat(), "cpu": cpu_name(), "commit": commit()}
        chosen.save.write_text(json.dumps(facts | {"jobs": [asdict(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
