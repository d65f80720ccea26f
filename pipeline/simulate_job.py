"""`lorabatch simulate`: one offline job on simulated workers under several policies.

The rows come from a job (indexed; its answers' lengths are drawn, because nobody knows them), from a trace of real
lengths, or from log-normal lengths. Everything is drawn from the seed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ..jobs.cost_profile import read_profile
from ..jobs.errors import JobRequestError
from ..scheduler.cost import CostModel
from ..scheduler.machines import MACHINES
from ..scheduler.policies import POLICIES, PolicyRun, simulate_policy
from ..scheduler.simulated_replica import ReplicaSettings
from ..scheduler.synthetic import draw_adapters, draw_lengths, make_adapters, make_workload, power_popularity
from ..scheduler.workload import BASE_MODEL, Workload
from .dry_run import dry_run
from .policy_plots import plot_runs
from .trace_file import read_trace_lengths

_RANKS = (8, 16, 32, 64, 128)
_MAX_TOKENS = 2048
_STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """What to simulate. `rows`, `adapters`, `skew` count without a job file. `policies`: empty is all.

    `cost_model`: a file that `lorabatch profile` wrote, or a name of `scheduler.machines`.
    """

    job_file: Path | None
    trace: Path | None
    rows: int
    adapters: int
    skew: float
    workers: int
    policies: tuple[str, ...]
    cost_model: str
    batch_rows: int
    seed: int
    output: Path


def simulate_job(request: SimulationRequest, console: Console | None = None) -> list[PolicyRun]:
    """Simulate, print the table, and write it (`simulation.json`) and the plots.

    Raises `JobRequestError` for what cannot be simulated, before anything is.
    """
    console = console or Console()
    policies = request.policies or tuple(POLICIES)
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise JobRequestError(*(f"policy={name!r}: expected one of {', '.join(POLICIES)}." for name in unknown))
    cost = known_cost(request.cost_model)
    workload = make_job(request)
    settings = ReplicaSettings(request.batch_rows, _STEP_TOKENS, adapter_source="storage", leap_steps=8)
    runs = [simulate_policy(name, workload, cost, settings, request.workers) for name in policies]
    console.print(policy_table(workload, runs, request.workers))
    request.output.mkdir(parents=True, exist_ok=True)
    results = {"rows": workload.num_rows, "workers": request.workers, "cost_model": request.cost_model}
    metrics = {run.policy: asdict(run.metrics) for run in runs}
    text = json.dumps(results | {"seed": request.seed, "policies": metrics}, indent=1)
    (request.output / "simulation.json").write_text(text + "\n", encoding="utf-8")
    names = plot_runs(runs, request.output)
    told = f"{request.output}: simulation.json" + "".join(f", {name}" for name in names)
    console.print(told if names else told + " (plots need matplotlib: pip install 'lorabatch[bench]')", soft_wrap=True)
    return runs


def known_cost(name: str) -> CostModel:
    """A machine's preset, or the cost model in a file. Raises `JobRequestError`."""
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).exists():
        raise JobRequestError(
            f"cost_model={name!r}: neither a file nor a known machine. Machines: {', '.join(MACHINES)}."
        )
    return read_profile(Path(name)).cost


def make_job(request: SimulationRequest) -> Workload:
    """The rows, with the lengths of their answers."""
    generator = np.random.default_rng(request.seed)
    if request.job_file is not None:
        return _with_drawn_answers(dry_run({}, request.job_file).workload, generator)
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
    return make_workload(make_adapters(ranks), adapter, prompt, output, max_tokens=_MAX_TOKENS)


def _with_drawn_answers(workload: Workload, generator: np.random.Generator) -> Workload:
    """Answers end anywhere up to `max_tokens`, each length alike: half of it on average, as plans expect."""
    drawn = np.ceil(workload.max_tokens * generator.random(workload.num_rows)).astype(np.int32)
    return replace(workload, output_tokens=drawn)


def policy_table(workload: Workload, runs: list[PolicyRun], workers: int) -> Table:
    """One line per policy, the fastest first."""
    title = f"{workload.num_rows} rows, {len(workload.adapters)} adapters, {workers} workers"
    table = Table(title=title)
    names = ("policy", "seconds", "x best", "tokens/s", "busy", "rows/step", "merged", "switch", "load")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    best = min(run.metrics.makespan_s for run in runs)
    for run in sorted(runs, key=lambda run: run.metrics.makespan_s):
        found = run.metrics
        shares = (found.merged_share, found.switch_share, found.load_share)
        table.add_row(
            run.policy,
            f"{found.makespan_s:.1f}",
            f"{found.makespan_s / best:.2f}" if best else "-",
            f"{found.output_tokens_per_s:.0f}",
            f"{found.utilisation:.0%}",
            f"{found.batch_rows:.1f}",
            *(f"{share:.1%}" for share in shares),
        )
    return table
