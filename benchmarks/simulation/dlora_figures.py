"""dLoRA (OSDI 24), figures 10, 11, 12 and 14, of one seed, and the same with what was tuned chosen otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lorabatch.benchmarks.simulation.draws import bursty_arrivals, bursty_arrivals_per_adapter
from lorabatch.benchmarks.simulation.figure import Claim, Figure
from lorabatch.benchmarks.simulation.lengths import Lengths
from lorabatch.benchmarks.simulation.placements import place_round_robin, replicate_for_bursts
from lorabatch.benchmarks.simulation.serving_run import (
    MIGRATION,
    Policy,
    ServingMetrics,
    at_rate,
    serve,
    sustained_factor,
)
from lorabatch.benchmarks.simulation.serving_simulation import ProactiveDispatcher, Requests, RoundRobinDispatcher
from lorabatch.scheduler.baselines.batchers import MergedBatcher, unmerged
from lorabatch.scheduler.baselines.dlora_batching import Credits, DynamicBatcher, dlora_batcher
from lorabatch.scheduler.baselines.dlora_migration import MigrationSettings
from lorabatch.scheduler.batchers.batching import Batcher
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import DLORA_A800_LLAMA_2_7B
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)

BATCH = 32
SLO_S = 0.5  # per output token (section 7.1)
LOAD = 0.95  # of the throughput of the same rows, all there at the start
NUM_REPLICAS = 8
COST = DLORA_A800_LLAMA_2_7B
REPLICA = ReplicaSettings(max_batch_rows=BATCH, max_step_tokens=2048, leap_steps=8, look_ahead=256)
#: Keys and values of about eight rows, so that rows wait for memory and not for a place. A token takes 32 layers of
#: 4,096 numbers, keys and values, 2 bytes each; adapters take pages of the same memory.
FULL = replace(REPLICA, kv_tokens=24_000, token_bytes=2 * 32 * 4096 * 2)
LATENCY, P90, QUEUEING = "average latency, s per output token", "P90 latency, s", "mean queueing delay, s"
THROUGHPUT = "output tokens per second"
BY_REPLICA = "mean queueing delay of a replica, s"
ONE_COPY = "RR, one copy of each adapter"
FALL = "fall of throughput from one adapter to more"
# A queue shorter than this is a few steps: no ratio is made of it.
_LEAST_QUEUE_S = 1.0
Arrive = Callable[[np.random.Generator, NDArray[np.int32], float], NDArray[np.float64]]


def together(generator: np.random.Generator, adapter: NDArray[np.int32], rate: float) -> NDArray[np.float64]:
    """Release times: bursts of all adapters at once."""
    return bursty_arrivals(generator, len(adapter), rate, cv=2.0)


def apart(generator: np.random.Generator, adapter: NDArray[np.int32], rate: float) -> NDArray[np.float64]:
    """Release times: bursts of each adapter's own, as the functions of a trace have them."""
    return bursty_arrivals_per_adapter(generator, adapter, rate, cv=4.0)


def at_once(generator: np.random.Generator, adapter: NDArray[np.int32], rate: float) -> NDArray[np.float64]:
    """Release times: one burst of everything."""
    return np.zeros(len(adapter))


def bimodal_lengths() -> Lengths:
    """Short answers, and one of ten that turns out twenty times as long."""
    generator = np.random.default_rng(8)
    is_long = generator.random(20_000) < 0.1
    short, long = draw_lengths(generator, 20_000, 60, 0.5, 200), draw_lengths(generator, 20_000, 1200, 0.3, 2000)
    prompt = draw_lengths(generator, 20_000, 300, 0.8, 2000)
    return Lengths(prompt, np.where(is_long, long, short).astype(np.int32), "bimodal lengths")


def requests(
    lengths: Lengths,
    num_rows: int,
    num_adapters: int,
    exponent: float,
    rate: float,
    seed: int,
    *,
    scale: float = 1.0,
    arrive: Arrive = together,
) -> Requests:
    """Bursty arrivals, popularity by a power law; rank 8 throughout, as in section 7.1."""
    generator = np.random.default_rng(seed)
    prompt, output = lengths.draw(generator, num_rows, scale=scale)
    adapter = draw_adapters(generator, num_rows, power_popularity(num_adapters, exponent))
    release = arrive(generator, adapter, rate)
    return Requests(make_workload(make_adapters([8] * num_adapters), adapter, prompt, output), release)


def batcher(
    num_adapters: int, *, thresholds: tuple[float, float] | None = None, credit_batches: float | None = None
) -> DynamicBatcher:
    """dLoRA's, perhaps with other start values of alpha and beta, or other credits of each adapter."""
    ranks = np.full(num_adapters, 8.0)
    made = dlora_batcher(COST, lambda: ranks, BATCH, mean_context=500.0)
    if thresholds is not None:
        made.alpha, made.beta = thresholds
    if credit_batches is not None:
        initial = credit_batches * BATCH
        made.credits = Credits(0, initial=initial, starve_above=1.5 * initial, normal_below=1.2 * initial)
    return made


def figure_10_and_14(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """One replica, 8 adapters: dynamic batching against both strawmen over skew, and against S-LoRA."""
    points = (0.0, 1.0, 3.0)
    # The paper does not print the cost of S-LoRA's kernels: here that of dLoRA's own, or 25 % of the base computation.
    cheap = replace(COST, lora_step_s=COST.lora_step_s * 0.25 / 0.389, rank_token_s=COST.rank_token_s * 0.25 / 0.389)
    runs: dict[str, tuple[CostModel, Callable[[], Batcher]]] = {
        "dLoRA": (COST, lambda: batcher(8)),
        "Merged-only": (COST, MergedBatcher),
        "Unmerged-only, S-LoRA": (COST, lambda: unmerged),
        "S-LoRA, kernel of 25 %": (cheap, lambda: unmerged),
        "dLoRA, alpha 1.2, beta 0.6": (COST, lambda: batcher(8, thresholds=(1.2, 0.6))),
        "dLoRA, 100 times the credit": (COST, lambda: batcher(8, credit_batches=20_000)),
    }
    ten = _over_skew(runs, points, lengths, num_rows, seed)
    return [
        Figure(
            "dLoRA 10",
            "skew",
            points,
            ten,
            (
                Claim("dLoRA", "Merged-only", "3.9", LATENCY),
                Claim("dLoRA", "Unmerged-only, S-LoRA", "2.4", LATENCY),
                Claim("dLoRA", "Merged-only", "5.2", P90),
                Claim("dLoRA", "Unmerged-only, S-LoRA", "2.5", P90),
            ),
        ),
        Figure("dLoRA 14", "skew", points, ten, (Claim("dLoRA", "Unmerged-only, S-LoRA", "1.8", LATENCY),)),
    ]


def _over_skew(
    runs: dict[str, tuple[CostModel, Callable[[], Batcher]]],
    points: Sequence[float],
    lengths: Lengths,
    num_rows: int,
    seed: int,
) -> dict[str, dict[str, list[float]]]:
    """At the rate with which dLoRA's latency is at the objective."""
    found: dict[str, list[ServingMetrics]] = {name: [] for name in runs}
    for exponent in points:
        base = requests(lengths, num_rows, 8, exponent, 1.0, seed)
        factor = sustained_factor(lambda f, base=base: _latency(at_rate(base, f)) / SLO_S, low=0.7, high=6.0, rounds=3)  # type: ignore[misc]
        for name, (cost, make) in runs.items():
            policy = Policy(name, make, ProactiveDispatcher)
            found[name].append(serve(at_rate(base, factor), policy, cost, REPLICA, 1)[0])
    return {
        LATENCY: {name: [m.latency_per_token_s for m in of_policy] for name, of_policy in found.items()},
        P90: {name: [m.latency_p90_s for m in of_policy] for name, of_policy in found.items()},
    }


def _latency(asked: Requests) -> float:
    policy = Policy("dLoRA", lambda: batcher(8), ProactiveDispatcher)
    return serve(asked, policy, COST, REPLICA, 1)[0].latency_per_token_s


def figure_11(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Eight replicas, 32 adapters: round robin, proactive dispatch, and with migration, over length scale."""
    points = (0.5, 2.0)
    b = _balancing(points, lengths, num_rows, seed, arrive=apart)
    together_b = _balancing((2.0,), lengths, num_rows, seed, arrive=together)
    full = _balancing((1.0,), bimodal_lengths(), num_rows, seed, arrive=apart, load=2.0, replica=FULL)
    burst = _balancing((1.0,), bimodal_lengths(), num_rows, seed, arrive=at_once, replica=FULL)
    queue = (
        Claim("dLoRA", "RR", "3.6", QUEUEING, least=_LEAST_QUEUE_S),
        Claim("dLoRA", "Proactive", "1.4", QUEUEING, least=_LEAST_QUEUE_S),
    )
    latency = (Claim("dLoRA", "RR", "23.5", LATENCY), Claim("dLoRA", "Proactive", "2.39", LATENCY))
    overload = _balancing((2.0,), lengths, num_rows, seed, arrive=apart, load=2.0)
    scale = "scale of lengths"
    return [
        _figure_2b(overload),
        Figure("dLoRA 11", scale, points, b, queue + latency),
        Figure("dLoRA 11, all adapters' bursts at once", scale, (2.0,), together_b),
        Figure("dLoRA 11, twice the load", scale, (2.0,), overload, queue + latency),
        Figure("dLoRA 11, twice the load, memory full, long rows", scale, (1.0,), full, queue + latency),
        Figure(
            "dLoRA 11, one burst, memory full, long rows",
            scale,
            (1.0,),
            burst,
            (*queue, *latency, Claim("dLoRA", "Proactive", "-", P90)),
        ),
    ]


def _figure_2b(values: dict[str, dict[str, list[float]]]) -> Figure:
    """Queueing of the replicas, one against the other, where each adapter is on one of eight replicas."""
    claim = Claim("shortest queue", "longest queue", "8.0", BY_REPLICA)
    return Figure("dLoRA 2b, twice the load", "scale of lengths", (2.0,), {BY_REPLICA: values[BY_REPLICA]}, (claim,))


def _balancing(
    points: Sequence[float],
    lengths: Lengths,
    num_rows: int,
    seed: int,
    *,
    arrive: Arrive,
    load: float = LOAD,
    replica: ReplicaSettings = REPLICA,
) -> dict[str, dict[str, list[float]]]:
    """Policies at a load that is a share of the throughput of the same rows, all there at the start."""
    num_adapters = 32
    start = place_round_robin(num_adapters, NUM_REPLICAS) > 0
    weights, memory = np.full(num_adapters, 1.6e7), np.full(NUM_REPLICAS, 2e8)
    placed = replicate_for_bursts(start, power_popularity(num_adapters, 1.0), weights, memory, 1e6)

    def make() -> Batcher:
        return batcher(num_adapters)

    policies = (
        Policy("RR", make, lambda: RoundRobinDispatcher(placed)),
        Policy(ONE_COPY, make, lambda: RoundRobinDispatcher(start)),
        Policy("Proactive", make, ProactiveDispatcher),
        Policy("dLoRA", make, ProactiveDispatcher, migrate_every_s=5.0, migration=MIGRATION),
        Policy(
            "dLoRA, migration as in jobs", make, ProactiveDispatcher, migrate_every_s=2.0, migration=MigrationSettings()
        ),
    )
    found: dict[str, list[ServingMetrics]] = {policy.name: [] for policy in policies}
    by_replica: dict[str, list[float]] = {"longest queue": [], "shortest queue": []}
    for scale in points:
        asked = requests(lengths, num_rows, num_adapters, 1.0, 8.0, seed, scale=scale, arrive=arrive)
        assert asked.rows.output_tokens is not None
        if arrive is not at_once:
            together_now = replace(asked, release_s=np.zeros(num_rows))
            most = serve(together_now, policies[2], COST, replica, NUM_REPLICAS)[0].output_tokens_per_s
            asked = at_rate(asked, load * most / float(asked.rows.output_tokens.mean()) / 8.0)
        for policy in policies:
            metrics, timeline = serve(asked, policy, COST, replica, NUM_REPLICAS)
            found[policy.name].append(metrics)
            if policy.name == ONE_COPY:
                waits = timeline.admit_s - asked.release_s
                means = [float(waits[timeline.replica == number].mean()) for number in np.unique(timeline.replica)]
                by_replica["longest queue"].append(max(means))
                by_replica["shortest queue"].append(min(means))
    return {
        BY_REPLICA: by_replica,
        QUEUEING: {name: [m.queueing_s for m in of_policy] for name, of_policy in found.items()},
        LATENCY: {name: [m.latency_per_token_s for m in of_policy] for name, of_policy in found.items()},
        P90: {name: [m.latency_p90_s for m in of_policy] for name, of_policy in found.items()},
    }


def figure_12(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Eight replicas, 1 to 128 adapters at one arrival rate: throughput of dLoRA, PEFT and one model each (vLLM)."""
    points = (1, 128)
    whole_models, peft, vllm = replace(COST, merge_s=0.0), "PEFT", "vLLM (uniform allocation)"
    values: dict[str, list[float]] = {"dLoRA": [], peft: [], vllm: []}
    for num_adapters in points:
        asked = requests(lengths, num_rows, num_adapters, 0.5, 9.0, seed)
        placed = place_round_robin(num_adapters, NUM_REPLICAS) > 0
        if num_adapters < NUM_REPLICAS:
            placed = np.ones((num_adapters, NUM_REPLICAS), dtype=bool)

        def one_each(placed: NDArray[np.bool_] = placed) -> RoundRobinDispatcher:
            return RoundRobinDispatcher(placed)

        def make(num_adapters: int = num_adapters) -> Batcher:
            return batcher(num_adapters)

        # 13 GB per whole model; an 80 GB device holds five beside their caches.
        whole = tuple(replace(adapter, weight_bytes=13 * 10**9) for adapter in asked.rows.adapters)
        models = replace(asked, rows=replace(asked.rows, adapters=whole))
        dlora = Policy("dLoRA", make, ProactiveDispatcher, migrate_every_s=5.0)
        one_model = Policy("", MergedBatcher, one_each)
        five = replace(REPLICA, adapter_slots=5)
        for name, (rows, policy, cost, replica) in {
            "dLoRA": (asked, dlora, COST, REPLICA),
            peft: (asked, one_model, COST, REPLICA),
            vllm: (models, one_model, whole_models, five),
        }.items():
            values[name].append(serve(rows, policy, cost, replica, NUM_REPLICAS)[0].output_tokens_per_s)
    claims = tuple(Claim("dLoRA", name, "ordering", THROUGHPUT, higher_is_better=True) for name in (peft, vllm))
    # Each system's own fall, as the paper prints those of PEFT and vLLM; dLoRA's throughput is called stable.
    falls = {name: [found[0] / min(found)] for name, found in values.items()} | {"no fall": [1.0]}
    return [
        Figure("dLoRA 12", "adapters", tuple(map(float, points)), {THROUGHPUT: values}, claims),
        Figure(
            "dLoRA 12, fall from one adapter to more",
            "-",
            (0.0,),
            {FALL: falls},
            (
                Claim("no fall", peft, "1.5", FALL),
                Claim("no fall", vllm, "3.0", FALL),
                Claim("dLoRA", "no fall", "1", FALL, is_parity=True),
            ),
        ),
    ]
