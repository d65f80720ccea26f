"""LoRAServe, figures 17, 19, 21 and 22, of one seed, and the same with what was tuned chosen otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lorabatch.benchmarks.simulation.draws import draw_shifting, poisson_arrivals
from lorabatch.benchmarks.simulation.figure import Claim, Figure
from lorabatch.benchmarks.simulation.lengths import Lengths
from lorabatch.benchmarks.simulation.placements import (
    extrapolate,
    permute_assignment,
    place_contiguous,
    place_random,
)
from lorabatch.benchmarks.simulation.serving_run import Policy, at_rate, serve, sustained_factor
from lorabatch.benchmarks.simulation.serving_simulation import (
    Dispatcher,
    FewestTokensDispatcher,
    LeastLoadDispatcher,
    Requests,
    RoutedDispatcher,
)
from lorabatch.scheduler.baselines.batchers import unmerged
from lorabatch.scheduler.baselines.loraserve import Leftovers, assign_loraserve
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.machines import LORASERVE_A100_LLAMA_7B
from lorabatch.scheduler.simulation.replica import ReplicaSettings
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    make_adapters,
    make_workload,
    power_popularity,
)

RANKS = (8, 16, 32, 64, 128)
SLO_S = 10.0
COST = LORASERVE_A100_LLAMA_7B
# Four A100 of 40 GB hold Llama-7B and about 280,000 KV slots; adapters take pages of the same memory. Coarse leaps of
# eight steps move times by 0.1 s.
REPLICA = ReplicaSettings(
    max_batch_rows=256,
    max_step_tokens=4096,
    kv_tokens=280_000,
    token_bytes=2 * 32 * 4096 * 2,
    leap_steps=8,
    is_coarse=True,
)
IN_HOST = "adapters in a server's host memory, most at once"
TTFT, RATE = "P95 time to first token, s", "requests per second within the objective"
# "least seconds" knows what a queued request costs at its rank, which Toppings does not.
# "levelled" splits leftovers over servers, which is this project's.
NAMES = ("LoRAServe", "Toppings", "least seconds", "S-LoRA Random", "S-LoRA Contiguous", "LoRAServe, levelled")
# Shares of rows with adapters of each of `RANKS`; the paper shows them as a picture only.
ASSUMED_SHARES = (0.45, 0.05, 0.25, 0.05, 0.20)
# Cost of a token per unit of rank, as a share of its base cost: as first read off figure 3, which is of one device.
# `COST` has the share on four devices, 0.0037.
FIRST_RANK_PRICE = 0.016
# Requests per second and server, before arrivals are scaled.
RATE_PER_SERVER = 5.0
# A time to first token below it is a few steps: no ratio is made of it.
LEAST_TTFT_S = 0.5
KNOWN, LEVELLED = "LoRAServe, demand known", "LoRAServe, levelled"


@dataclass(slots=True)
class LoRAServePlanner:
    """Recomputes Algorithm 1's placement each time step, remembering the last one so that little moves."""

    #: Rank of each adapter, int64 `[num_adapters]`.
    ranks: NDArray[np.int64]
    #: Servers of the cluster.
    num_servers: int
    #: Costs, for operating points.
    cost: CostModel = COST
    #: Placement of the last time step, `[num_adapters, num_servers]` (None: none yet).
    previous: NDArray[np.float64] | None = None
    #: Way of step 4.
    leftovers: Leftovers = "whole"

    def __call__(self, history: NDArray[np.float64]) -> Dispatcher:
        """The dispatcher for the coming time step."""
        points = {
            int(rank): self.cost.operating_point(int(rank), batch_rows=64, prompt_tokens=900.0, output_tokens=200.0)
            for rank in np.unique(self.ranks)
        }
        demand = extrapolate(history) if len(history) else np.zeros(len(self.ranks))
        placed = assign_loraserve(self.ranks, demand, points, self.num_servers, self.leftovers)
        if self.previous is not None:
            placed = permute_assignment(placed, self.previous, self.ranks.astype(float))
        self.previous = placed
        return RoutedDispatcher(placed)


def policies(asked: Requests, num_servers: int, seed: int, cost: CostModel = COST) -> dict[str, Policy]:
    """The four systems and two more, with the same kernel and the same first-come-first-served batching."""
    ranks = np.array([adapter.rank for adapter in asked.rows.adapters])
    planner = LoRAServePlanner(ranks, num_servers, cost)
    levelled = LoRAServePlanner(ranks, num_servers, cost, leftovers="levelled")
    random = place_random(len(ranks), num_servers, np.random.default_rng(seed + 1))
    contiguous = place_contiguous(ranks, num_servers)
    # Time step zero knows last period's demand, as an operator's history would: the shares of the first rows.
    first = asked.release_s <= asked.release_s.max() / 6
    seen = np.bincount(asked.rows.adapter_index[first], minlength=len(ranks)).astype(float)
    every_s = float(asked.release_s.max()) / 6
    whole = np.bincount(asked.rows.adapter_index, minlength=len(ranks)).astype(float)
    return {
        "LoRAServe": Policy(
            "LoRAServe",
            lambda: unmerged,
            lambda: planner(seen[None, :]),
            replan=planner,
            replan_every_s=every_s,
        ),
        "Toppings": Policy("Toppings", lambda: unmerged, FewestTokensDispatcher),
        "least seconds": Policy("least seconds", lambda: unmerged, LeastLoadDispatcher),
        "S-LoRA Random": Policy("S-LoRA Random", lambda: unmerged, lambda: RoutedDispatcher(random)),
        "S-LoRA Contiguous": Policy("S-LoRA Contiguous", lambda: unmerged, lambda: RoutedDispatcher(contiguous)),
        LEVELLED: Policy(
            LEVELLED, lambda: unmerged, lambda: levelled(seen[None, :]), replan=levelled, replan_every_s=every_s
        ),
        KNOWN: Policy(KNOWN, lambda: unmerged, lambda: LoRAServePlanner(ranks, num_servers, cost)(whole[None, :])),
    }


def requests(
    lengths: Lengths,
    num_rows: int,
    ranks: Sequence[int],
    adapter: NDArray[np.int32],
    rate: float,
    seed: int,
    *,
    is_poisson: bool = True,
) -> Requests:
    """Poisson arrivals, or arrivals at even distances (section V-E)."""
    generator = np.random.default_rng(seed + 11)
    prompt, output = lengths.draw(generator, num_rows)
    release = poisson_arrivals(generator, num_rows, rate) if is_poisson else (1 + np.arange(num_rows)) / rate
    return Requests(make_workload(make_adapters(ranks), adapter, prompt, output), release)


def sustained_rate(base: Requests, name: str, num_servers: int, seed: int, cost: CostModel = COST) -> float:
    """Requests per second, of requests at `RATE_PER_SERVER`, with the P95 time to first token at 10 s."""

    def excess(factor: float) -> float:
        scaled = at_rate(base, factor)
        policy = policies(scaled, num_servers, seed, cost)[name]
        return serve(scaled, policy, cost, REPLICA, num_servers)[0].ttft_p95_s / SLO_S

    return RATE_PER_SERVER * num_servers * sustained_factor(excess, low=0.8, high=4.2, rounds=2)


def production_mix(
    num_rows: int, num_adapters: int, seed: int, shares: Sequence[float] = ASSUMED_SHARES
) -> tuple[list[int], NDArray[np.int32]]:
    """Five ranks with uneven shares, and a power law of exponent 1 over the adapters within each (section V-E)."""
    generator = np.random.default_rng(seed + 3)
    per_rank = num_adapters // len(RANKS)
    of_rank = generator.choice(len(RANKS), num_rows, p=shares)
    within = generator.choice(per_rank, num_rows, p=power_popularity(per_rank, 1.0))
    ranks = [rank for rank in RANKS for _ in range(per_rank)]
    return ranks, (of_rank * per_rank + within).astype(np.int32)


def figure_17(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Four servers, 50, 100 and 200 adapters of the production mix: rate within the objective."""
    dearer = replace(COST, rank_token_s=FIRST_RANK_PRICE * COST.prefill_token_s)
    as_paper = tuple(
        Claim("LoRAServe", name, paper, RATE, higher_is_better=True)
        for name, paper in (("Toppings", "1.2"), ("S-LoRA Random", "2"), ("S-LoRA Contiguous", "2"))
    )
    fewer = ("LoRAServe", "Toppings", "S-LoRA Contiguous")
    points = (50, 100, 200)
    by_number = [_rates(lengths, num_rows, seed, num_adapters=number) for number in points]
    values = {name: [found[name][0] for found in by_number] for name in NAMES}
    otherwise = (
        ("LoRAServe 17, even shares of ranks", _rates(lengths, num_rows, seed, fewer, shares=(0.2,) * 5)),
        ("LoRAServe 17, first price of ranks", _rates(lengths, num_rows, seed, fewer, cost=dearer)),
    )
    return [
        Figure("LoRAServe 17", "adapters", tuple(map(float, points)), {RATE: values}, as_paper),
        *(Figure(name, "adapters", (100.0,), {RATE: found}) for name, found in otherwise),
    ]


def figure_18(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Four servers, 100 adapters of the production mix at 30 requests per second: adapters in each server's host
    memory, and the P95 time to first token of each server, by server, least first.
    """
    ranks, adapter = production_mix(num_rows, 100, seed)
    asked = requests(lengths, num_rows, ranks, adapter, 30.0, seed)
    made = policies(asked, 4, seed)
    values: dict[str, dict[str, list[float]]] = {IN_HOST: {}, TTFT: {}}
    for name in NAMES:
        metrics, timeline = serve(asked, made[name], COST, REPLICA, 4)
        values[IN_HOST][name] = sorted(map(float, metrics.most_in_host))
        waits = timeline.first_token_s - asked.release_s
        values[TTFT][name] = sorted(
            float(np.quantile(np.nan_to_num(waits[timeline.replica == server], nan=np.inf), 0.95, method="higher"))
            for server in range(4)
            if (timeline.replica == server).any()
        ) + [0.0] * (4 - len(np.unique(timeline.replica[timeline.replica >= 0])))
    return [
        Figure("LoRAServe 18", "server", (1.0, 2.0, 3.0, 4.0), values, (Claim("LoRAServe", "Toppings", "16", IN_HOST),))
    ]


def _rates(
    lengths: Lengths,
    num_rows: int,
    seed: int,
    names: Sequence[str] = NAMES,
    shares: Sequence[float] = ASSUMED_SHARES,
    cost: CostModel = COST,
    num_adapters: int = 100,
) -> dict[str, list[float]]:
    ranks, adapter = production_mix(num_rows, num_adapters, seed, shares)
    base = requests(lengths, num_rows, ranks, adapter, 4 * RATE_PER_SERVER, seed)
    return {name: [sustained_rate(base, name, 4, seed, cost)] for name in names}


def figure_19(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Four servers, 25 adapters, three popularities of ranks, Poisson and even arrivals: P95 time to first token near
    LoRAServe's limit.
    """
    generator = np.random.default_rng(seed + 5)
    ranks = [rank for rank in RANKS for _ in range(5)]
    uniform = power_popularity(25, 0.0)
    most_large = np.array([0.125] * 4 + [0.5]).repeat(5) / 5
    small_first = np.exp(-np.arange(5.0)).repeat(5)
    drawn = (
        draw_adapters(generator, num_rows, uniform),
        draw_shifting(generator, num_rows, most_large, most_large[::-1].copy()),
        draw_adapters(generator, num_rows, small_first / small_first.sum()),
    )
    claims = tuple(
        Claim("LoRAServe", name, paper, TTFT, least=LEAST_TTFT_S)
        for name, paper in (("Toppings", "ordering"), ("S-LoRA Random", "9"), ("S-LoRA Contiguous", "9"))
    )
    found = [
        _near_the_limit(
            requests(lengths, num_rows, ranks, adapter, 4 * RATE_PER_SERVER, seed, is_poisson=is_poisson), seed
        )
        for is_poisson in (True, False)
        for adapter in drawn
    ]
    label = "uniform, shifting, exponential; with even arrivals 4, 5, 6"
    return [
        Figure("LoRAServe 19", label, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), {TTFT: _columns(found)}, claims),
    ]


def _near_the_limit(base: Requests, seed: int) -> dict[str, float]:
    """P95 time to first token of every policy at 98 % of the rate that LoRAServe sustains."""
    rate = 0.98 * sustained_rate(base, "LoRAServe", 4, seed)
    return _ttft(at_rate(base, rate / (4 * RATE_PER_SERVER)), seed)


def _ttft(asked: Requests, seed: int) -> dict[str, float]:
    made = policies(asked, 4, seed)
    return {name: serve(asked, made[name], COST, REPLICA, 4)[0].ttft_p95_s for name in NAMES}


def _columns(found: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [of_point[name] for of_point in found] for name in NAMES}


def figure_21(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """4, 8 and 12 servers with requests and adapters in proportion: the sustained rate of each."""
    rates: dict[str, list[float]] = {"LoRAServe": [], KNOWN: []}
    for num_servers in (4, 8, 12):
        scale = num_servers // 4
        ranks = [rank for rank in RANKS for _ in range(5 * scale)]
        adapter = draw_adapters(np.random.default_rng(seed + 3), num_rows * scale, power_popularity(len(ranks), 0.0))
        base = requests(lengths, num_rows * scale, ranks, adapter, RATE_PER_SERVER * num_servers, seed)
        for name, found in rates.items():
            found.append(sustained_rate(base, name, num_servers, seed))
    values = {name: found[1:] for name, found in rates.items()}
    values |= {f"{name} on 4, in proportion": [2 * found[0], 3 * found[0]] for name, found in rates.items()}
    claim = Claim("LoRAServe", "LoRAServe on 4, in proportion", "1", RATE, higher_is_better=True, is_parity=True)
    return [Figure("LoRAServe 21", "servers", (8.0, 12.0), {RATE: values}, (claim,))]


def figure_22(lengths: Lengths, num_rows: int, seed: int) -> list[Figure]:
    """Four servers, 100 adapters, popularity of ranks by a power law with falling share of large ranks."""
    points = (1 / 3, 1.0, 2.0, 3.0)
    ranks = [rank for rank in RANKS for _ in range(20)]
    generator = np.random.default_rng(seed + 9)
    workloads = []
    for exponent in points:
        of_rank = generator.choice(5, num_rows, p=power_popularity(5, exponent))
        within = generator.choice(20, num_rows, p=power_popularity(20, exponent))
        adapter = (of_rank * 20 + within).astype(np.int32)
        workloads.append(requests(lengths, num_rows, ranks, adapter, 4 * RATE_PER_SERVER, seed))
    # One rate for all, as in the paper: near what LoRAServe sustains with the most large ranks.
    factor = 0.95 * sustained_rate(workloads[0], "LoRAServe", 4, seed) / (4 * RATE_PER_SERVER)
    found = [_ttft(at_rate(workload, factor), seed) for workload in workloads]
    claims = tuple(
        Claim("LoRAServe", name, "ordering", TTFT, least=LEAST_TTFT_S)
        for name in ("Toppings", "S-LoRA Random", "S-LoRA Contiguous")
    )
    return [
        Figure("LoRAServe 22", "exponent of popularity, small ranks first", points, {TTFT: _columns(found)}, claims)
    ]
