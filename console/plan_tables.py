"""Output of `lorabatch plan`: adapters, waves, workers and the totals, as text for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..engine.memory.limits import CpuMemory
from ..jobs.options.values import parse_price
from ..jobs.progress import counted
from ..pipeline.planning import prediction
from ..pipeline.planning.dry_run import AdapterForecast, DryRun
from ..scheduler.planning.waves import Shard
from .terminal import plain_console

_LINES_SHOWN = 30
# Characters of an example that are shown.
_BEGINNING_SHOWN, _END_SHOWN = 1000, 300


@dataclass(frozen=True, slots=True)
class WaveFacts:
    """One wave of a plan: shards that have their mode and their adapters in common."""

    #: Number of the wave.
    wave_id: int
    #: Mode of the shards.
    mode: str
    #: Names of the adapters, sorted.
    adapters: tuple[str, ...]
    #: Shards of the wave.
    num_shards: int
    #: Rows of all shards.
    num_rows: int
    #: Tokens that the rows are predicted to generate.
    predicted_output_tokens: int
    #: Seconds that one worker needs for all shards.
    engine_s: float


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker's share of the job under the placement."""

    #: Number of the worker.
    worker: int
    #: Shards placed on the worker.
    num_shards: int
    #: Rows of these shards.
    num_rows: int
    #: Adapters that the worker will need.
    num_adapters: int
    #: Bytes of these adapters.
    adapter_bytes: int
    #: Bytes of the base model's weights, as stored.
    weight_bytes: int
    #: Seconds after which the worker has finished its shards.
    predicted_s: float


def waves(found: DryRun) -> list[WaveFacts]:
    """Facts of each wave, in the order in which their first shards are dispatched."""
    forecast = found.forecast
    names: dict[str, list[str]] = {}
    for adapter in found.adapters:
        names.setdefault(adapter.sha256, []).append(adapter.name)
    members: dict[int, list[Shard]] = {}
    for shard in forecast.plan.shards:
        members.setdefault(shard.wave_id, []).append(shard)
    # Shards are numbered in the order of their dispatch.
    return [
        WaveFacts(
            wave_id,
            shards[0].mode,
            tuple(sorted({name for shard in shards for key in shard.adapters for name in names[key]})),
            len(shards),
            sum(shard.num_rows for shard in shards),
            sum(shard.predicted_output_tokens for shard in shards),
            float(sum(forecast.shard_s[shard.shard_id] for shard in shards)),
        )
        for wave_id, shards in sorted(members.items(), key=lambda one: min(shard.shard_id for shard in one[1]))
    ]


def workers(found: DryRun) -> list[WorkerFacts]:
    """Facts of each worker under the placement. While a job runs, idle workers help others, so that shares differ."""
    forecast, adapters, placement = found.forecast, found.workload.adapters, found.forecast.placement
    if placement is None:
        return []
    weight_of = {adapter.adapter_id: adapter.weight_bytes for adapter in adapters}
    facts = []
    for worker in range(found.num_workers):
        mine = [forecast.plan.shards[i] for i in np.flatnonzero(placement.replica_of == worker)]
        adapter_ids = {adapter_id for shard in mine for adapter_id in shard.adapters}
        facts.append(
            WorkerFacts(
                worker,
                len(mine),
                sum(shard.num_rows for shard in mine),
                len(adapter_ids),
                sum(weight_of[adapter_id] for adapter_id in adapter_ids),
                found.weight_bytes,
                float(placement.finish_s[worker]),
            )
        )
    return facts


def plan_json(found: DryRun, gpu_hour_price: str | float | None) -> dict[str, Any]:
    """A JSON-ready object with all facts of the printed tables, and more."""
    hour = parse_price(gpu_hour_price)
    forecast, placement = found.forecast, found.forecast.placement
    return {
        "rows": found.workload.num_rows,
        "error_rows": sum(kind.num_rows for kind in found.errors),
        "errors": [asdict(kind) for kind in found.errors],
        "update": found.update and asdict(found.update) | {"kept_bytes": found.kept_bytes},
        "prompt_tokens": int(found.workload.prompt_tokens.sum()),
        "shared_prompt_tokens": forecast.shared_prompt_tokens,
        "predicted_output_tokens": sum(share.predicted_output_tokens for share in found.shares),
        "workers": found.num_workers,
        "speeds": None if found.slowness is None else [1 / slow for slow in found.slowness],
        "policy": found.settings.policy,
        "placement_policy": found.settings.placement,
        "predicted_s": forecast.predicted_s,
        "bound_s": found.bound_s,
        "predicted_range_s": found.range_s,
        "canary_rows": sum(shard.num_rows for shard in forecast.plan.shards if shard.is_canary),
        "simulated_rows": forecast.simulated_rows,
        "placement_s": placement and placement.makespan_s,
        "placement_lower_bound_s": placement and placement.bound_s,
        "placement_gap": placement and placement.gap,
        "placement_method": placement and placement.method,
        "replica_s": forecast.replica_s,
        "price": price(found, gpu_hour_price),
        "currency": hour[1] if hour and hour[1] else None,
        "device": asdict(found.settings.device),
        "engine_limits": asdict(found.settings.limits),
        "engine_memory": asdict(found.memory) if found.memory else None,
        "cost_model": {"origin": found.settings.cost_origin} | found.settings.step_prices.to_json(),
        "notes": list(found.notes),
        "example": found.example and {"row": found.example[0], "prompt": found.example[1]},
        "audit": [adapter.model_dump(mode="json") for adapter in found.adapters],
        "adapters": [asdict(share) | {"name": share.name or ""} for share in found.shares],
        "waves": [asdict(wave) for wave in waves(found)],
        "placement": [asdict(worker) for worker in workers(found)],
    }


def price(found: DryRun, gpu_hour_price: str | float | None) -> float | None:
    """Price of all workers for the predicted time of the job; None when no price of an hour was given. Raises
    `JobRequestError` for a price that `parse_price` does not read.
    """
    hour = parse_price(gpu_hour_price)
    return None if hour is None else found.forecast.replica_s / 3600 * hour[0]


def print_plan(
    found: DryRun, gpu_hour_price: str | float | None, console: Console | None = None, *, as_json: bool = False
) -> None:
    """Print tables of adapters, waves and workers, and the totals last; or all facts as JSON."""
    if as_json:
        typer.echo(json.dumps(plan_json(found, gpu_hour_price), indent=1))
        return
    console = console or plain_console()
    for line in found.notes:
        console.print(line, soft_wrap=True)
    for line in _example(found):
        console.print(line, soft_wrap=True)
    for kind in found.errors:
        text = f"{kind.num_rows} rows cannot be answered ({kind.kind}), first at {kind.location}: {kind.sentence}"
        console.print(text, soft_wrap=True)
    columns: tuple[str, ...] = ("adapter", "rank", "rows", "prompt tokens", "output tokens", "engine s")
    _print_table(console, [_adapter_cells(a) for a in _by_seconds(found)], columns, "adapter")
    columns = ("wave", "mode", "adapters", "shards", "rows", "output tokens", "engine s")
    _print_table(console, [_wave_cells(*one) for one in enumerate(waves(found), 1)], columns, "mode", "adapters")
    if found.forecast.placement is not None:
        columns = ("worker", "shards", "rows", "adapters", "their MB", "base files MB", "predicted s")
        _print_table(console, [_worker_cells(worker) for worker in workers(found)], columns)
    for line in totals(found, gpu_hour_price):
        console.print(line, soft_wrap=True)


def _example(found: DryRun) -> list[str]:
    """A line that names a row, and its prompt, of a long one the beginning and the end; none without an example."""
    if found.example is None:
        return []
    place, prompt = found.example
    if len(prompt) > _BEGINNING_SHOWN + _END_SHOWN:
        left_out = len(prompt) - _BEGINNING_SHOWN - _END_SHOWN
        prompt = f"{prompt[:_BEGINNING_SHOWN]}\n… {left_out} characters …\n{prompt[-_END_SHOWN:]}"
    return [f"Prompt of row {place}, as the model gets it:", *(f"  {line}" for line in prompt.split("\n"))]


def totals(found: DryRun, gpu_hour_price: str | float | None) -> list[str]:
    """Lines with rows, seconds, the placement's bound and gap, the price, and the origin of the cost model."""
    forecast = found.forecast
    output = sum(share.predicted_output_tokens for share in found.shares)
    lines = [
        *([found.update.to_text()] if found.update else []),
        f"{found.workload.num_rows} rows, {int(found.workload.prompt_tokens.sum())} prompt tokens, about {output} "
        f"output tokens, {len(forecast.plan.shards)} shards on {found.num_workers} workers",
        f"Predicted: {forecast.predicted_s:.1f} s (simulated on predicted lengths{_part_played(found)})"
        f"{_left_out(found)}",
        *_canary(found),
        *_speeds(found),
        *_bound(found),
        *_range(found),
        *_engines(found),
        *_policy(found),
        *_placement(found),
        f"Costs of steps: {found.settings.cost_origin}",
    ]
    if forecast.shared_prompt_tokens:
        reused = f"{forecast.shared_prompt_tokens} prompt tokens are reused: rows of one adapter begin alike"
        lines.insert(2 if found.update else 1, reused)
    hour, cost = parse_price(gpu_hour_price), price(found, gpu_hour_price)
    if hour is not None and cost is not None:
        hours = f"{forecast.replica_s / 3600:.3f} worker hours at {hour[0]:g}"
        unit = f" {hour[1]}" if hour[1] else ""
        lines.append(f"Price: {_money(cost)}{unit} for {hours}{unit}" + ("" if unit else ", in the same currency"))
    return lines


def _money(cost: float) -> str:
    """An amount with at least two digits that are not 0."""
    return f"{cost:,.2f}" if cost >= 1 or cost == 0 else f"{cost:.2g}"


def _part_played(found: DryRun) -> str:
    played = found.forecast.simulated_rows
    num_rows = sum(shard.num_rows for shard in found.forecast.plan.shards if shard.has_engine_work)
    return "" if played == num_rows else f" of {played} of the rows"


def _left_out(found: DryRun) -> str:
    """A clause about the work of an update for which there are no predicted seconds; "" for other jobs."""
    if found.update is None or not found.update.kept:
        return ""
    size = f" of {found.kept_bytes / 1e6:,.1f} MB" if found.kept_bytes else ""
    return f", without the time to read parts{size} for the answers that are kept and to write them again"


def _canary(found: DryRun) -> list[str]:
    """A line about the canary; none without one."""
    shards = [shard for shard in found.forecast.plan.shards if shard.is_canary]
    if not shards:
        return []
    seconds = sum(float(found.forecast.shard_s[shard.shard_id]) for shard in shards)
    rows, parts = counted(sum(shard.num_rows for shard in shards), "row"), counted(len(shards), "shard")
    return [f"Canary: {rows} in {parts} are answered first, in about {seconds:.1f} s of one engine"]


def _speeds(found: DryRun) -> list[str]:
    """A line about the speeds that were given, and the numbers that they change; none without speeds."""
    if found.slowness is None:
        return []
    speeds = ", ".join(f"{1 / slow:g}" for slow in found.slowness)
    return [f"Workers are taken to be {speeds} times as fast as the cost model says"]


def _bound(found: DryRun) -> list[str]:
    """A line that compares the predicted seconds with the lower bound; none without a bound."""
    if not found.bound_s:
        return []
    over = found.forecast.predicted_s / found.bound_s
    least = (
        f"With the costs below and answers as long as expected, no schedule on {found.num_workers} workers takes less "
        f"than {found.bound_s:.1f} s"
    )
    return [f"{least}; predicted are {over:.2f} times as long"]


def _engines(found: DryRun) -> list[str]:
    """Lines about the limits of a step, the device and the memory of engines, and about a device that is assumed."""
    device, limits, num_processes = found.settings.device, found.settings.limits, found.settings.engine.tensor_parallel
    processes = f" of {num_processes} processes each" if num_processes > 1 else ""
    tier = limits.host_tier_bytes
    pool = "" if found.memory else f", {limits.pool_bytes / 1e9:.1f} GB for keys, values and adapters"
    pool += "" if tier is None else f", {tier / 1e9:.1f} GB of host memory for adapters that left the pool"
    lines = [
        f"Engines{processes}: {limits.batch_rows} rows and {limits.step_tokens} tokens a step{pool} "
        f"({device.title}, {device.memory_bytes / 1e9:.0f} GB); linear layers multiply in {found.settings.products}",
        *([_memory(found.memory)] if found.memory else []),
        *filter(None, [found.settings.rounded_weights, found.settings.rounding]),
    ]
    if device.assumption:
        lines.append(f"The device is not known: {device.assumption}. Seconds and price depend on it")
    return lines


def _memory(planned: CpuMemory) -> str:
    parts = (planned.unmerged, planned.weights, planned.pool, planned.working, planned.merged)
    whole, weights, pool, working, merged = (f"{part / 1e9:.1f}" for part in parts)
    return (
        f"Each engine takes at most {whole} GB of memory: {weights} for the base model, {pool} for keys, values and "
        f"adapters, {working} to compute" + (f"; {merged} more once adapters are merged" if planned.merged else "")
    )


def _policy(found: DryRun) -> list[str]:
    """A line about policy and placement, if they deal rows out before the job; else none."""
    policy, placement = found.settings.policy, found.settings.placement
    dealt = f", rows dealt out by {placement}" if placement.startswith("loraserve") else ""
    return [f"Policy: {policy}{dealt}"] if found.settings.is_dealt else []


def _placement(found: DryRun) -> list[str]:
    """A line about the placement of shards on equal workers, with a bound of the placement, not of the job."""
    placement = found.forecast.placement
    if found.slowness is not None or placement is None:
        return []
    return [
        f"Placement: each worker opens the shards above first. Priced alone, they take {placement.makespan_s:.1f} s, "
        f"at best {placement.bound_s:.1f} s (gap of the placement {placement.gap:.2%}, {placement.method})"
    ]


def _range(found: DryRun) -> list[str]:
    """Lines about the lengths of answers: known from earlier jobs, or assumed, with the resulting range of seconds."""
    known = prediction.known_adapters(found.settings, found.workload)
    names = "1 adapter" if known == 1 else f"{known} adapters"
    lines = [f"Answers of {names} are taken to be as long as in earlier jobs, for the same task"] if known else []
    if found.range_s is not None:
        shortest_s, longest_s = found.range_s
        lines.append(
            f"{'Other answers' if known else 'Answers'} are assumed to have any length up to max_tokens, half of it on "
            f"average. {shortest_s:.1f} s if they take a quarter of it, {longest_s:.1f} s if they take all"
        )
    return lines


def _by_seconds(found: DryRun) -> list[AdapterForecast]:
    return sorted(found.shares, key=lambda share: (-share.engine_s, share.name or ""))


def _print_table(console: Console, cells: Sequence[tuple[str, ...]], columns: Sequence[str], *left: str) -> None:
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for line in cells[:_LINES_SHOWN]:
        table.add_row(*line)
    console.print(table)
    if len(cells) > _LINES_SHOWN:
        console.print(f"… and {len(cells) - _LINES_SHOWN} more; --json has all")


def _adapter_cells(adapter: AdapterForecast) -> tuple[str, ...]:
    counts = (adapter.rank, adapter.num_rows, adapter.prompt_tokens, adapter.predicted_output_tokens)
    return (adapter.name or "(base model)", *map(str, counts), f"{adapter.engine_s:.1f}")


def _wave_cells(place: int, wave: WaveFacts) -> tuple[str, ...]:
    names = ", ".join(wave.adapters[:3]) + (f" and {len(wave.adapters) - 3} more" if len(wave.adapters) > 3 else "")
    counts = (wave.num_shards, wave.num_rows, wave.predicted_output_tokens)
    return (str(place), wave.mode, names or "-", *map(str, counts), f"{wave.engine_s:.1f}")


def _worker_cells(worker: WorkerFacts) -> tuple[str, ...]:
    counts = (worker.worker, worker.num_shards, worker.num_rows, worker.num_adapters)
    sizes = (worker.adapter_bytes / 1e6, worker.weight_bytes / 1e6)
    return (*map(str, counts), *(f"{size:.0f}" for size in sizes), f"{worker.predicted_s:.1f}")
