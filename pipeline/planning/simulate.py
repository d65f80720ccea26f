"""Simulates one offline job on simulated workers under several policies: `lorabatch simulate`.

The rows are those of a job (indexed, with lengths of answers that its plan expects), or have lengths from a CSV file in
the format of the Azure LLM inference traces (Azure public data set, 2023), or log-normal lengths. All draws come from
the seed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...jobs.cost_profile import read_profile
from ...jobs.errors import JobRequestError
from ...jobs.options.problems import policy_problem
from ...jobs.options.values import check_speeds, parse_speeds
from ...scheduler.costs.machines import MACHINES
from ...scheduler.policies import PLACEMENTS, POLICIES
from ...scheduler.simulation.run import PolicyRun
from ...scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from ...scheduler.workload import BASE_MODEL, Workload
from . import prediction
from .dry_run import dry_run
from .settings import RunSettings
from .step_prices import MACHINE_TITLES

_RANKS = (8, 16, 32, 64, 128)
_MAX_TOKENS = 2048
# Machine whose engine's limits apply without a job: a profile gives the costs of steps, but no model.
_MACHINE = "h200-llama-3-8b"
_MACHINE_OF = {True: "cpu-smollm2-135m", False: _MACHINE}


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """The job to simulate, the workers, and the policies to compare."""

    #: Job file whose rows are simulated; None for a trace or drawn lengths.
    job_file: Path | None
    #: CSV file of real lengths; None for drawn lengths. Not used with a job file.
    trace: Path | None
    #: Number of rows. Not used with a job file.
    rows: int
    #: Number of adapters; 0 for rows of the base model. Not used with a job file.
    adapters: int
    #: Exponent of the adapters' popularity. Not used with a job file.
    skew: float
    #: Number of simulated workers.
    workers: int
    #: Names of policies; empty for all that the job's mode allows.
    policies: tuple[str, ...]
    #: File that `lorabatch profile` wrote, or a name in `MACHINES`; None for the job's own, without a job file for
    #: `_MACHINE`.
    cost_model: str | None
    #: Most rows in a step; None for the number that the engine would choose.
    batch_rows: int | None
    #: Seed of all draws.
    seed: int
    #: Folder for results.
    output: Path
    #: Speed of each worker, as `parse_speeds` reads it; None for workers as fast as the cost model says.
    speeds: str | None = None
    #: Name of the placement, for all policies.
    placement: str = "planner"


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of `simulate_job`."""

    #: The request.
    request: SimulationRequest
    #: Rows that were simulated, with true lengths of answers.
    workload: Workload
    #: Settings before a policy was chosen.
    settings: RunSettings
    #: Simulated run of each policy.
    runs: tuple[PolicyRun, ...]
    #: Names of the files written to `request.output`.
    files: tuple[str, ...]
    #: Sentences for people: the rows, and the machine that each worker is taken to be.
    assumptions: tuple[str, str]


def simulate_job(request: SimulationRequest) -> SimulationResult:
    """Simulate one job under every policy; write `simulation.json` and, if matplotlib is installed, plots.

    Raises `JobRequestError` for a request that cannot be simulated, before any policy is.
    """
    problems = [
        f"{option}={name!r}: expected one of {', '.join(known)}."
        for option, names, known in (
            ("policy", request.policies, POLICIES),
            ("placement", (request.placement,), PLACEMENTS),
        )
        for name in names
        if name not in known
    ]
    if problems:
        raise JobRequestError(*problems)
    slowness = None if request.speeds is None else parse_speeds(request.speeds)
    check_speeds(slowness, request.workers)
    workload, settings = make_job(request)
    policies = request.policies or [name for name in POLICIES if not policy_problem(name, settings.engine.mode)]
    chosen = [settings.under(name, request.placement) for name in policies]
    runs = [prediction.simulate(each, workload, request.workers, slowness) for each in chosen]
    request.output.mkdir(parents=True, exist_ok=True)
    results = {"rows": workload.num_rows, "workers": request.workers, "speeds": request.speeds}
    results |= {"cost_model": settings.cost_origin, "placement": request.placement}
    assumptions = _rows_of(request), _machine_of(request, settings)
    results |= {"rows_are": assumptions[0], "machine": assumptions[1]}
    metrics = {run.policy: asdict(run.metrics) for run in runs}
    text = json.dumps(results | {"seed": request.seed, "policies": metrics}, indent=1)
    (request.output / "simulation.json").write_text(text + "\n", encoding="utf-8")
    files = ("simulation.json", *plot_runs(runs, request.output))
    return SimulationResult(request, workload, settings, tuple(runs), files, assumptions)


def _rows_of(request: SimulationRequest) -> str:
    if request.job_file is not None:
        return f"Rows: those of {request.job_file}, with answers as long as its plan expects"
    ranks = ", ".join(map(str, _RANKS[: request.adapters]))
    adapters = f"{request.adapters} adapters of ranks {ranks}" if request.adapters else "no adapters"
    lengths = f"lengths of {request.trace}" if request.trace else "log-normal lengths, medians 600 and 130 tokens"
    return f"Rows: {request.rows:,} drawn with seed {request.seed}: {lengths}, {adapters}"


def _machine_of(request: SimulationRequest, settings: RunSettings) -> str:
    """A sentence on the machine that each simulated worker is taken to be."""
    if request.job_file is not None:
        costs = MACHINE_TITLES.get(settings.cost_origin, settings.cost_origin)
        return f"Each worker: an engine of the job on {settings.device.title}; costs of steps: {costs}"
    title = MACHINE_TITLES[settings.device.name]
    if settings.cost_origin != settings.device.name:
        return f"Each worker: limits of {title}; costs of steps: {settings.cost_origin}"
    others = ", ".join(name for name in MACHINES if name != settings.device.name)
    return (
        f"Each worker: {title} (preset {settings.device.name}, not this machine). --cost-model takes a file of "
        f"`lorabatch profile`, or {others}"
    )


def make_job(request: SimulationRequest) -> tuple[Workload, RunSettings]:
    """The rows with true lengths of their answers, and the settings of a run of them. Raises `JobRequestError`."""
    generator = np.random.default_rng(request.seed)
    if request.job_file is not None:
        found = dry_run(_changed_options(request), request.job_file)
        settings = found.settings
        if request.cost_model is not None and request.cost_model in MACHINES:
            engine = replace(settings.engine, cost=MACHINES[request.cost_model])
            settings = replace(settings, engine=engine, cost_origin=request.cost_model, prices=None)
        quantile = generator.random(found.workload.num_rows)
        return prediction.with_answers(settings, found.workload, quantile=quantile), settings
    settings = _machine_settings(request)
    if request.trace is not None:
        prompts, outputs = read_trace_lengths(request.trace)
        chosen = generator.integers(0, len(prompts), request.rows)
        prompt, output = prompts[chosen], outputs[chosen]
    else:
        prompt = draw_lengths(generator, request.rows, 600, 1.0, 4000)
        output = draw_lengths(generator, request.rows, 130, 0.8, 1000)
    if request.adapters:
        adapter = draw_adapters(generator, request.rows, power_popularity(request.adapters, request.skew))
    else:
        adapter = np.full(request.rows, BASE_MODEL, np.int32)
    ranks = [_RANKS[i % len(_RANKS)] for i in range(request.adapters)]
    return make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=_MAX_TOKENS), settings


def _changed_options(request: SimulationRequest) -> dict[str, Any]:
    """Options of the job that the request replaces."""
    # `simulate_job` sets the policies to compare, whichever the job asks for.
    options: dict[str, Any] = {"workers": request.workers, "policy": "planner", "placement": "planner"}
    if request.batch_rows is not None:
        options["batch_rows"] = request.batch_rows
    if request.cost_model is not None and request.cost_model not in MACHINES:
        _check_cost_model(request.cost_model)
        options["cost_model"] = request.cost_model
    return options


def _machine_settings(request: SimulationRequest) -> RunSettings:
    """Settings for rows without a job: the engines of a preset machine, with a measured cost model if one is named."""
    name = request.cost_model or _MACHINE
    if name in MACHINES:
        return RunSettings.of_machine(name, batch_rows=request.batch_rows)
    _check_cost_model(name)
    profile = read_profile(Path(name))
    settings = RunSettings.of_machine(_MACHINE_OF[profile.device == "cpu"], batch_rows=request.batch_rows)
    return replace(settings, engine=replace(settings.engine, cost=profile.cost), cost_origin=name)


def _check_cost_model(name: str) -> None:
    if not Path(name).exists():
        raise JobRequestError(
            f"cost_model={name!r}: neither a file nor a known machine. Machines: {', '.join(MACHINES)}."
        )


_COLUMNS = ("ContextTokens", "GeneratedTokens")


def read_trace_lengths(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output tokens of every request, int32 `[num_requests]` each, at least 1.

    Raises `JobRequestError` naming the first line that cannot be read.
    """
    pairs: list[tuple[int, int]] = []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise JobRequestError(
                    f"trace={str(path)!r}: no column {' and no column '.join(missing)}. Expected a CSV file with "
                    f"{' and '.join(_COLUMNS)}."
                )
            pairs.extend((max(1, int(row[_COLUMNS[0]])), max(1, int(row[_COLUMNS[1]]))) for row in reader)
    except (OSError, UnicodeDecodeError) as error:
        raise JobRequestError(f"trace={str(path)!r}: cannot be read ({error}). Check the path.") from None
    except (ValueError, TypeError) as error:
        raise JobRequestError(f"trace={str(path)!r}: line {len(pairs) + 2} holds no number ({error}).") from None
    if not pairs:
        raise JobRequestError(f"trace={str(path)!r}: holds no requests.")
    prompt, output = np.array(pairs, dtype=np.int32).T
    return prompt, output


_LINES = (("-", 4.0), ("-", 2.5), ("--", 1.8), (":", 1.8), ("-.", 1.2), ("-", 1.0))


def plot_runs(runs: Sequence[PolicyRun], folder: Path) -> list[str]:
    """Write plots of the runs into `folder` and return their names; none without matplotlib."""
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
        # Curves of policies that do the same coincide: wide solid ones are below, narrow broken ones above, so that all
        # show.
        style, width = _LINES[min(place, len(_LINES) - 1)]
        axes.plot(finish_s, np.arange(1, len(finish_s) + 1), label=run.policy, linestyle=style, linewidth=width)
    axes.set(xlabel="seconds", ylabel="rows finished", xlim=(0, None), ylim=(0, None))
    axes.grid(color="#dfe3ea", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return [save(bars, "makespan.png"), save(curves, "rows-over-time.png")]
