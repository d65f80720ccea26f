"""The long form: `python -m lorabatch.tests.end_to_end.chaos --runs 200 --seed 1`.

Each run is one seed's scenario; `--runs 1 --seed N` repeats run N. Exit code 1 when any run has a fault. Disks are
filled and networks cut as root only, where `mount` and `ip` are there; other machines pass over these blows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args

# Trials compute the echo engine's answers themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "echo"))

from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.scenario import EngineKind, Trouble, make_scenario, troubles
from lorabatch.tests.end_to_end.chaos.trial import Outcome, Trial


def main() -> int:
    """Run the scenarios of consecutive seeds and print a line for each."""
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="chaos-")).resolve()
    num_runs, num_faulty = 0, 0
    for outcome in _run_all(options, folder):
        num_runs += 1
        num_faulty += bool(outcome.faults)
        print(_line(outcome), flush=True)
        if options.results is not None:
            with options.results.open("a") as results:
                results.write(json.dumps(asdict(outcome)) + "\n")
        if not outcome.faults:
            shutil.rmtree(_trial_folder(folder, outcome.scenario.seed), ignore_errors=True)
    print(f"{num_runs} runs, {num_faulty} with faults" + (f"; their folders: {folder}" if num_faulty else ""))
    if not num_faulty:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_faulty else 0


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m lorabatch.tests.end_to_end.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=1, help="trials beside each other")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further run after so long")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes of each engine, all real then")
    parser.add_argument("--stages", action="store_true", help="jobs with stages, of echo engines")
    parser.add_argument("--only", choices=get_args(Trouble), help="pass over seeds without this trouble")
    parser.add_argument("--material", type=Path, help="a folder with what all trials share, for the next command too")
    parser.add_argument("--results", type=Path, help="a file that gains one line of JSON per run")
    return parser.parse_args()


def _run_all(options: Any, folder: Path) -> Iterator[Outcome]:
    """Outcomes in the order of their seeds."""
    material = Material((options.material or folder / "material").resolve())
    scenario_of = partial(make_scenario, tensor_parallel=options.tensor_parallel, has_stages=options.stages)
    kinds = ("staged",) if options.stages else [kind for kind in get_args(EngineKind) if kind != "staged"]
    for engine in kinds if options.tensor_parallel == 1 else ("real",):
        material.undisturbed_digest(engine, options.tensor_parallel)
    stop_s = time.monotonic() + options.minutes * 60

    def run(seed: int) -> Outcome | None:
        if time.monotonic() > stop_s:
            return None
        return Trial(scenario_of(seed), material, _trial_folder(folder, seed)).run()

    seeds = (seed for seed in count(options.seed) if options.only in (None, *troubles(scenario_of(seed))))
    with ThreadPoolExecutor(options.at_once) as pool:
        for outcome in pool.map(run, islice(seeds, options.runs)):
            if outcome is not None:
                yield outcome


def _trial_folder(folder: Path, seed: int) -> Path:
    return folder / f"trial-{seed}"


def _line(outcome: Outcome) -> str:
    scenario = outcome.scenario
    place = f"{scenario.engine:4} {scenario.cluster:8} {scenario.num_workers} workers"
    place += f" of engines of {scenario.tensor_parallel} processes" if scenario.tensor_parallel > 1 else ""
    place += ", one engine held up" if scenario.is_held_up else ""
    place += f", output on {scenario.store}" if scenario.store != "disk" else ""
    line = f"{scenario.seed:5} {place} {outcome.seconds:6.1f} s {outcome.num_starts} starts {outcome.num_loans} loans"
    line += f" {outcome.longest_silence_s:.0f} s silent"
    verdict = "; ".join(outcome.faults) or "right"
    return f"{line}  {', '.join(outcome.blows) or 'no blow fell'}: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
