"""One serving run of requests under a named policy, its metrics, and the search for the rate a policy can sustain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lorabatch.benchmarks.simulation.serving_simulation import (
    Dispatcher,
    Replan,
    Requests,
    ServingSettings,
    ServingSimulation,
)
from lorabatch.scheduler.baselines.dlora_migration import MigrationSettings
from lorabatch.scheduler.batchers.batching import Batcher
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.timeline import Timeline

# Most rows that move wait and have computed nothing yet: moving them costs little, and small imbalances are worth it.
MIGRATION = MigrationSettings(gamma=1.02, trigger=1.05, least_gain=0.01)


@dataclass(frozen=True, slots=True)
class Policy:
    """How replicas batch and where requests go. Batchers and dispatchers keep state, so each run makes new ones."""

    #: Name in the figures.
    name: str
    #: Makes the batcher of one replica.
    make_batcher: Callable[[], Batcher]
    #: Makes the dispatcher of one run.
    make_dispatcher: Callable[[], Dispatcher]
    #: Seconds between decisions to migrate rows; None: rows stay.
    migrate_every_s: float | None = None
    #: Prices and thresholds of migration.
    migration: MigrationSettings = MIGRATION
    #: Makes a new dispatcher from the adapters' demand so far; None: the first one stays.
    replan: Replan | None = None
    #: Seconds between calls of `replan`; None: never.
    replan_every_s: float | None = None


def serve(
    requests: Requests, policy: Policy, cost: CostModel, settings: ReplicaSettings, num_replicas: int
) -> tuple[ServingMetrics, Timeline]:
    """Run to the end; a run with arrivals is cut off at twenty times their span."""
    timeline = Timeline.empty(requests.rows.num_rows, num_replicas)
    replicas = [
        SimulatedReplica(i, requests.rows, cost, policy.make_batcher(), settings, timeline) for i in range(num_replicas)
    ]
    span = float(requests.release_s.max())
    has_limit = settings.kv_tokens is not None and settings.token_bytes > 0
    serving = ServingSettings(
        batch_rows=settings.max_batch_rows,
        token_bytes=settings.token_bytes,
        memory_bytes=float((settings.kv_tokens or 0) * settings.token_bytes) if has_limit else float("inf"),
        migrate_every_s=policy.migrate_every_s,
        migration=policy.migration,
        replan_every_s=policy.replan_every_s,
        give_up_s=20 * span if span > 0 else float("inf"),
    )
    simulation = ServingSimulation(requests, replicas, policy.make_dispatcher(), cost, serving, policy.replan)
    simulation.run()
    found = serving_metrics(requests, timeline)
    return replace(found, most_in_host=tuple(simulation.most_in_host.tolist())), timeline


def at_rate(requests: Requests, factor: float) -> Requests:
    """The requests, arriving `factor` times as fast."""
    return replace(requests, release_s=requests.release_s / factor)


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """Metrics of requests that arrived over time."""

    #: dLoRA's average latency: end-to-end seconds over output tokens, both summed.
    latency_per_token_s: float
    #: End-to-end seconds, 90th percentile over requests.
    latency_p90_s: float
    #: Mean seconds from release to admission.
    queueing_s: float
    #: Seconds from release to the first token, 95th percentile over requests.
    ttft_p95_s: float
    #: Output tokens per second, from the first release to the last finish.
    output_tokens_per_s: float
    #: Adapters in the host memory of each replica, most at once.
    most_in_host: tuple[int, ...] = ()


def serving_metrics(requests: Requests, timeline: Timeline) -> ServingMetrics:
    """Metrics over all requests."""
    assert requests.rows.output_tokens is not None, "a simulation knows the true lengths"
    released, tokens = requests.release_s, np.maximum(1, requests.rows.output_tokens)
    is_done = np.isfinite(timeline.finish_s)
    latency = _or_infinite(timeline.finish_s - released)
    span = float(timeline.finish_s[is_done].max() - released.min()) if is_done.any() else float("inf")
    return ServingMetrics(
        latency_per_token_s=float(latency.sum() / tokens.sum()),
        latency_p90_s=_quantile(latency, 0.9),
        queueing_s=float(_or_infinite(timeline.admit_s - released).mean()),
        ttft_p95_s=_quantile(_or_infinite(timeline.first_token_s - released), 0.95),
        output_tokens_per_s=float(tokens[is_done].sum() / span),
    )


def _or_infinite(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isnan(seconds), np.inf, seconds)


def _quantile(values: NDArray[np.float64], share: float) -> float:
    """The value below which `share` of them are; never interpolates, so that infinities stay what they are."""
    return float(np.sort(values)[min(len(values) - 1, int(share * len(values)))]) if len(values) else 0.0


def sustained_factor(excess: Callable[[float], float], *, low: float, high: float, rounds: int = 4) -> float:
    """The rate factor at which a metric reaches its objective (`excess` 1), on logarithmic scales: bisection, and a
    straight line through the ends of the last interval."""
    ends = {factor: excess(factor) for factor in (low, high)}
    if ends[low] >= 1 or ends[high] <= 1:
        return low if ends[low] >= 1 else high
    for _ in range(rounds):
        middle = float(np.sqrt(low * high))
        ends[middle] = excess(middle)
        low, high = (middle, high) if ends[middle] <= 1 else (low, middle)
    share = 0.5 if np.isinf(ends[high]) else np.log(1 / ends[low]) / np.log(ends[high] / ends[low])
    return float(low * (high / low) ** share)
