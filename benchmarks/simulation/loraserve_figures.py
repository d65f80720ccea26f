"""LoRAServe, figures 17, 19, 21 and 22."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lorabatch.benchmarks.simulation.figure import Claim, Figure
from lorabatch.benchmarks.simulation.lengths import Lengths
from lorabatch.benchmarks.simulation.serving_run import Policy, at_rate, serve, sustained_factor
from lorabatch.scheduler.baselines.batchers import UnmergedBatcher
from lorabatch.scheduler.baselines.loraserve import (
    Routing,
    assign_loraserve,
    extrapolate,
    place_contiguous,
    place_random,
)
from lorabatch.scheduler.baselines.serving import (
    Dispatcher,
    FewestTokensDispatcher,
    LeastLoadDispatcher,
    RoutedDispatcher,
)
from lorabatch.scheduler.cost import LORASERVE_A100_LLAMA_7B
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_shifting,
    make_adapters,
    make_workload,
    poisson_arrivals,
    power_popularity,
    uniform_popularity,
)
from lorabatch.scheduler.workload import Workload

RANKS = (8, 16, 32, 64, 128)
SLO_S = 10.0
COST = LORASERVE_A100_LLAMA_7B
# Four A100 of 40 GB hold Llama-7B and about 280,000 KV slots.
REPLICA = ReplicaSettings(max_batch_rows=256, max_step_tokens=4096, kv_tokens=280_000, leap_steps=16)
TTFT, RATE = "P95 time to first token, s", "requests per second within the objective"
NAMES = ("LoRAServe", "Toppings", "least seconds", "S-LoRA Random", "S-LoRA Contiguous")
KNOWN = "LoRAServe, demand known"


@dataclass(slots=True)
class LoRAServePlanner:
    """Recomputes Algorithm 1's placement each time step, remembering the last one so that little moves."""

    ranks: NDArray[np.int64]
    num_servers: int
    previous: Routing | None = None

    def __call__(self, history: NDArray[np.float64]) -> Dispatcher:
        """The dispatcher for the coming time step."""
        points = {
            int(rank): COST.operating_point(int(rank), batch_rows=64, prompt_tokens=900.0, output_tokens=200.0)
            for rank in np.unique(self.ranks)
        }
        demand = extrapolate(history) if len(history) else np.zeros(len(self.ranks))
        self.previous = assign_loraserve(
            self.ranks, demand, points, self.num_servers, previous=self.previous, weight_bytes=self.ranks.astype(float)
        )
        return RoutedDispatcher(self.previous)


def policies(workload: Workload, num_servers: int) -> dict[str, Policy]:
    """The four systems, with the same kernel and the same first-come-first-served batching."""
    ranks = np.array([adapter.rank for adapter in workload.adapters])
    planner = LoRAServePlanner(ranks, num_servers)
    random = place_random(len(ranks), num_servers, np.random.default_rng(1))
    contiguous = place_contiguous(ranks, num_servers)
    # Time step zero knows last period's demand, as an operator's history would: the shares of the first rows.
    assert workload.release_s is not None
    first = workload.release_s <= workload.release_s.max() / 6
    seen = np.bincount(workload.adapter_index[first], minlength=len(ranks)).astype(float)
    every_s = float(workload.release_s.max()) / 6
    return {
        "LoRAServe": Policy(
            "LoRAServe",
            UnmergedBatcher,
            lambda: planner(seen[None, :]),
            replan=planner,
            replan_every_s=every_s,
        ),
        "Toppings": Policy("Toppings", UnmergedBatcher, FewestTokensDispatcher),
        "least seconds": Policy("least seconds", UnmergedBatcher, LeastLoadDispatcher),
        "S-LoRA Random": Policy("S-LoRA Random", UnmergedBatcher, lambda: RoutedDispatcher(random)),
        "S-LoRA Contiguous": Policy("S-LoRA Contiguous", UnmergedBatcher, lambda: RoutedDispatcher(contiguous)),
    }


def knowing_demand(workload: Workload, num_servers: int) -> Policy:
    """LoRAServe with one placement, from the requests that the whole run will bring."""
    ranks = np.array([adapter.rank for adapter in workload.adapters])
    coming = np.bincount(workload.adapter_index, minlength=len(ranks)).astype(float)
    return Policy(KNOWN, UnmergedBatcher, lambda: LoRAServePlanner(ranks, num_servers)(coming[None, :]))


def requests(lengths: Lengths, num_rows: int, ranks: list[int], adapter: NDArray[np.int32], rate: float) -> Workload:
    """Poisson arrivals."""
    generator = np.random.default_rng(11)
    prompt, output = lengths.draw(generator, num_rows)
    release = poisson_arrivals(generator, num_rows, rate)
    return make_workload(make_adapters(ranks), adapter, prompt, output, release_s=release)


def sustained_rate(base: Workload, base_rate: float, name: str, num_servers: int) -> float:
    """Requests per second with the P95 time to first token within 10 s."""

    def is_within(factor: float) -> bool:
        policy = knowing_demand(base, num_servers) if name == KNOWN else policies(base, num_servers)[name]
        scaled = at_rate(base, factor)
        scaled_policy = replace(policy, replan_every_s=policy.replan_every_s and policy.replan_every_s / factor)
        return serve(scaled, scaled_policy, COST, REPLICA, num_servers)[0].ttft_p95_s <= SLO_S

    return base_rate * sustained_factor(is_within, low=0.25, high=8.0)


def production_mix(num_rows: int, num_adapters: int, seed: int = 3) -> tuple[list[int], NDArray[np.int32]]:
    """Five ranks with uneven shares, and a power law of exponent 1 over the adapters within each (section V-E).

    The paper shows the shares of its ranks as a picture only; those here are assumed.
    """
    generator = np.random.default_rng(seed)
    per_rank = num_adapters // len(RANKS)
    of_rank = generator.choice(len(RANKS), num_rows, p=[0.45, 0.05, 0.25, 0.05, 0.20])
    within = generator.choice(per_rank, num_rows, p=power_popularity(per_rank, 1.0))
    ranks = [rank for rank in RANKS for _ in range(per_rank)]
    return ranks, (of_rank * per_rank + within).astype(np.int32)


def figure_17(lengths: Lengths, num_rows: int) -> Figure:
    """Four servers, 50, 100 and 200 adapters of the production mix: rate within the objective."""
    points = (50, 100, 200)
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    for num_adapters in points:
        ranks, adapter = production_mix(num_rows, num_adapters)
        base = requests(lengths, num_rows, ranks, adapter, rate=20.0)
        for name in NAMES:
            values[name].append(sustained_rate(base, 20.0, name, 4))
    return Figure(
        "LoRAServe fig. 17",
        "Production mix: rate within the objective",
        "adapters",
        tuple(float(p) for p in points),
        {RATE: values},
        (
            Claim("LoRAServe", "Toppings", 1.2, RATE, higher_is_better=True),
            Claim("LoRAServe", "S-LoRA Random", 2.0, RATE, higher_is_better=True),
            Claim("LoRAServe", "S-LoRA Contiguous", 2.0, RATE, higher_is_better=True),
        ),
        "The production trace is not public: ranks and the power law within a rank follow the paper's text, the shares "
        "of the ranks (45, 5, 25, 5 and 20 % from rank 8 to 128) are assumed. Toppings routes by the tokens that each "
        "server is serving and has queued, blind to ranks, as the paper describes it; “least seconds” is a stronger "
        "rival that knows what every queued request costs at its rank. Rates are found by bisection in steps of 6 %.",
    )


def figure_19(lengths: Lengths, num_rows: int) -> Figure:
    """Four servers, 25 adapters, three popularities of ranks: P95 time to first token near LoRAServe's limit."""
    generator = np.random.default_rng(5)
    ranks = [rank for rank in RANKS for _ in range(5)]
    uniform = uniform_popularity(25)
    most_large = np.array([0.125] * 4 + [0.5]).repeat(5) / 5
    most_small = most_large[::-1].copy()
    small_first = np.exp(-np.arange(5.0)).repeat(5)
    drawn = (
        draw_adapters(generator, num_rows, uniform),
        draw_shifting(generator, num_rows, most_large, most_small),
        draw_adapters(generator, num_rows, small_first / small_first.sum()),
    )
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    for adapter in drawn:
        base = requests(lengths, num_rows, ranks, adapter, rate=20.0)
        factor = 0.98 * sustained_rate(base, 20.0, "LoRAServe", 4) / 20.0
        scaled = at_rate(base, factor)
        for name, policy in policies(scaled, 4).items():
            values[name].append(serve(scaled, policy, COST, REPLICA, 4)[0].ttft_p95_s)
    return Figure(
        "LoRAServe fig. 19",
        "Time to first token on three popularities",
        "1 uniform, 2 shifting skew, 3 exponential",
        (1.0, 2.0, 3.0),
        {TTFT: values},
        (
            Claim("LoRAServe", "Toppings", None, TTFT),
            Claim("LoRAServe", "S-LoRA Random", 9.0, TTFT),
            Claim("LoRAServe", "S-LoRA Contiguous", 9.0, TTFT),
        ),
        "Measured at 98 % of the rate LoRAServe sustains; the paper's runs time out where ours go on queueing. With "
        "uniform popularity contiguous placement is balanced by itself, which is the paper's finding too.",
    )


def figure_21(lengths: Lengths, num_rows: int) -> Figure:
    """4, 8 and 12 servers with requests and adapters in proportion: the sustained rate."""
    points = (4, 8, 12)
    rates: dict[str, list[float]] = {"LoRAServe": [], KNOWN: []}
    for num_servers in points:
        scale = num_servers // 4
        ranks = [rank for rank in RANKS for _ in range(5 * scale)]
        adapter = draw_adapters(np.random.default_rng(3), num_rows * scale, uniform_popularity(len(ranks)))
        base = requests(lengths, num_rows * scale, ranks, adapter, rate=20.0 * scale)
        for name, found in rates.items():
            found.append(sustained_rate(base, 20.0 * scale, name, num_servers))
    kept, known = (
        [f"{4 * rate / servers / found[0]:.0%}" for rate, servers in zip(found, points, strict=True)]
        for found in rates.values()
    )
    linear = [rates["LoRAServe"][0] * num_servers / 4 for num_servers in points]
    return Figure(
        "LoRAServe fig. 21",
        "Weak scaling",
        "servers",
        tuple(float(p) for p in points),
        {RATE: rates | {"in proportion": linear}},
        (Claim("LoRAServe", "in proportion", 1.0, RATE, higher_is_better=True),),
        "The paper's default trace: Poisson arrivals, uniform popularity, 25 adapters per four servers. The paper: 32, "
        f"64 and 96 requests per second on 4, 8 and 12 servers. Ours keeps {kept[1]} of the proportion on 8 and "
        f"{kept[2]} on 12. With known demand, the same placement keeps {known[1]} and {known[2]}: what is "
        "lost is in the estimates, lines through time steps in which an adapter has a few dozen requests. Requests "
        f"arrive for {num_rows / rates['LoRAServe'][0]:.0f} s; in shorter runs, where queues cannot grow, rates are "
        "higher.",
    )


def figure_22(lengths: Lengths, num_rows: int) -> Figure:
    """Four servers, 100 adapters, popularity of ranks by a power law with falling share of large ranks."""
    points = (1 / 3, 1.0, 2.0, 3.0)
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    ranks = [rank for rank in RANKS for _ in range(20)]
    generator = np.random.default_rng(9)
    drawn = []
    for exponent in points:
        of_rank = generator.choice(5, num_rows, p=power_popularity(5, exponent))
        within = generator.choice(20, num_rows, p=power_popularity(20, exponent))
        drawn.append((of_rank * 20 + within).astype(np.int32))
    # One rate for all, as in the paper: what LoRAServe sustains with the most large ranks.
    first = requests(lengths, num_rows, ranks, drawn[0], rate=20.0)
    factor = 0.95 * sustained_rate(first, 20.0, "LoRAServe", 4) / 20.0
    for adapter in drawn:
        scaled = at_rate(requests(lengths, num_rows, ranks, adapter, rate=20.0), factor)
        for name, policy in policies(scaled, 4).items():
            values[name].append(serve(scaled, policy, COST, REPLICA, 4)[0].ttft_p95_s)
    return Figure(
        "LoRAServe fig. 22",
        "Time to first token over the skew of ranks",
        "exponent of popularity (small ranks first)",
        points,
        {TTFT: values},
        (
            Claim("LoRAServe", "Toppings", None, TTFT),
            Claim("LoRAServe", "S-LoRA Random", None, TTFT),
            Claim("LoRAServe", "S-LoRA Contiguous", None, TTFT),
        ),
        "One arrival rate for all exponents, near what LoRAServe sustains at the first; as in the paper its latency "
        "falls as large ranks become rare. At exponent 1 it is 10.6 s where Toppings has 7.6 s: the servers that small "
        "ranks share with rank 128 are the last to finish.",
    )
