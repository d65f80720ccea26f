from __future__ import annotations

import numpy as np
import pytest

from lorabatch.benchmarks.simulation.draws import poisson_arrivals
from lorabatch.benchmarks.simulation.serving_run import serving_metrics
from lorabatch.benchmarks.simulation.serving_simulation import (
    ClusterView,
    FewestTokensDispatcher,
    LeastLoadDispatcher,
    ProactiveDispatcher,
    Requests,
    RoundRobinDispatcher,
    RoutedDispatcher,
    ServingSettings,
    ServingSimulation,
)
from lorabatch.scheduler.baselines.batchers import unmerged
from lorabatch.scheduler.baselines.dlora_migration import MigrationSettings
from lorabatch.scheduler.costs.machines import DLORA_A800_LLAMA_2_7B as COST
from lorabatch.scheduler.simulation.replica import ReplicaSettings, SimulatedReplica
from lorabatch.scheduler.simulation.synthetic import (
    draw_adapters,
    draw_lengths,
    make_adapters,
    make_workload,
    power_popularity,
)
from lorabatch.scheduler.simulation.timeline import Timeline


def serve(dispatcher, **changes):
    simulation, timeline = simulated(dispatcher, **changes)
    return simulation.requests, timeline


def simulated(dispatcher, *, num_rows=300, rate=2.0, num_replicas=2, seed=0, replan=None, **changes):
    rng = np.random.default_rng(seed)
    workload = make_workload(
        make_adapters([8] * 4),
        draw_adapters(rng, num_rows, power_popularity(4, 0.0)),
        draw_lengths(rng, num_rows, 200, 0.8, 1500),
        draw_lengths(rng, num_rows, 100, 1.0, 800),
    )
    requests = Requests(workload, poisson_arrivals(rng, num_rows, rate))
    timeline = Timeline.empty(num_rows, num_replicas)
    settings = ReplicaSettings(max_batch_rows=16, leap_steps=32)
    replicas = [SimulatedReplica(i, workload, COST, unmerged, settings, timeline) for i in range(num_replicas)]
    simulation = ServingSimulation(requests, replicas, dispatcher, COST, ServingSettings(16, **changes), replan)
    simulation.run()
    return simulation, timeline


def test_every_request_is_answered_after_it_came():
    requests, timeline = serve(ProactiveDispatcher())
    assert np.isfinite(timeline.finish_s).all()
    assert (timeline.admit_s >= requests.release_s - 1e-9).all()


def test_a_light_load_does_not_queue():
    requests, timeline = serve(ProactiveDispatcher(), rate=0.2, num_rows=60)
    assert serving_metrics(requests, timeline).queueing_s < 0.3


def test_by_pending_time_beats_round_robin_over_one_copy_each():
    placed = np.zeros((4, 2), bool)
    placed[:, 0] = True
    queueing = [
        serving_metrics(*serve(dispatcher)).queueing_s
        for dispatcher in (ProactiveDispatcher(), RoundRobinDispatcher(placed))
    ]
    assert queueing[0] < queueing[1] / 2


def test_migration_empties_the_full_replica():
    placed = np.zeros((4, 2), bool)
    placed[:, 0] = True
    alone = serving_metrics(*serve(RoundRobinDispatcher(placed))).queueing_s
    requests, timeline = serve(RoundRobinDispatcher(placed), migrate_every_s=2.0)
    assert np.isfinite(timeline.finish_s).all()
    assert serving_metrics(requests, timeline).queueing_s < alone / 2


def test_a_full_memory_triggers_migration_where_queues_do_not():
    # dLoRA, section 5.2: the algorithm is triggered "when the available GPU memory of a replica is beyond a memory
    # threshold", and memory beyond it is swapped.
    placed = np.tile([[True, False], [False, True]], (2, 1))
    never = MigrationSettings(trigger=100.0, least_gain=0.0, swap_bytes_per_s=1e7)
    moved = []
    for memory_bytes in (1e12, 1e7):
        limits = {"token_bytes": 1000, "memory_bytes": memory_bytes, "migration": never}
        simulation, _ = simulated(RoundRobinDispatcher(placed), rate=1.0, migrate_every_s=2.0, **limits)
        moved.append(simulation.num_moved)
    assert moved[0] == 0
    assert moved[1] > 0


def test_rows_that_run_move_with_what_they_have_generated():
    # dLoRA, section 5.2: "migrate LoRA adapters and requests (with intermediate states)", by token transfer.
    placed = np.zeros((4, 2), bool)
    placed[:, 0] = True
    simulation, timeline = simulated(RoundRobinDispatcher(placed), num_rows=16, rate=100.0, migrate_every_s=2.0)
    assert simulation.num_moved > 0
    assert (timeline.admit_s < 2.0).all()
    # Nothing that was generated is generated again.
    assert timeline.row_steps.sum() == simulation.requests.rows.output_tokens.sum()
    assert timeline.row_steps[1] > 0


def test_a_server_fetches_adapters_that_it_lacks_from_one_that_has_them():
    # LoRAServe, section IV-B: adapters lie on the servers where they are placed, come from a peer on first access, and
    # leave a server where they are not placed any more.
    here, there = np.array([[1.0, 0.0]] * 4), np.array([[0.0, 1.0]] * 4)
    simulation, timeline = simulated(
        RoutedDispatcher(here), replan_every_s=20.0, replan=lambda history: RoutedDispatcher(there)
    )
    assert simulation.most_in_host.tolist() == [4, 4]
    assert simulation.in_host.tolist() == [[False, True]] * 4
    assert timeline.replica[-1] == 1
    # Where every adapter is on every server, nothing is fetched or given up.
    everywhere, _ = simulated(FewestTokensDispatcher())
    assert everywhere.in_host.all()


def test_a_replan_takes_over_from_the_next_request():
    seen = []

    def replan(history):
        seen.append(history.shape)
        return LeastLoadDispatcher()

    placed = np.zeros((4, 2), bool)
    placed[:, 0] = True
    _, timeline = serve(RoundRobinDispatcher(placed), replan_every_s=20.0, replan=replan)
    assert seen[0] == (1, 4)
    assert (timeline.replica == 1).sum() > 50


def test_a_run_that_is_cut_off_counts_the_rest_as_endless():
    requests, timeline = serve(ProactiveDispatcher(), rate=50.0, give_up_s=10.0)
    metrics = serving_metrics(requests, timeline)
    assert metrics.latency_per_token_s == float("inf")
    assert 0 < np.isnan(timeline.finish_s).mean() < 1


def test_metrics_of_a_known_timeline():
    workload = make_workload(
        make_adapters([8]),
        np.zeros(2, np.int32),
        np.full(2, 10, np.int32),
        np.array([5, 15], np.int32),
    )
    requests = Requests(workload, np.array([0.0, 1.0]))
    timeline = Timeline.empty(2, 1)
    timeline.admit_s[:] = [1.0, 1.0]
    timeline.first_token_s[:] = [2.0, 3.0]
    timeline.finish_s[:] = [4.0, 11.0]
    metrics = serving_metrics(requests, timeline)
    assert metrics.latency_per_token_s == pytest.approx((4 + 10) / 20)
    assert metrics.queueing_s == pytest.approx(0.5)
    assert metrics.ttft_p95_s == pytest.approx(2.0)
    assert metrics.output_tokens_per_s == pytest.approx(20 / 11)


def make_view(queue_s, resident=((True, False, False),), load_s=(2.0,), queue_tokens=None):
    tokens = np.array(queue_s, float) if queue_tokens is None else np.array(queue_tokens, float)
    return ClusterView(np.array(queue_s, float), tokens, np.array(resident), np.array(load_s, float))


def test_a_short_queue_beats_a_resident_adapter_only_by_more_than_its_load():
    assert ProactiveDispatcher().choose(0, 1.0, make_view([1.9, 0.0, 0.0])) == 0
    assert ProactiveDispatcher().choose(0, 1.0, make_view([2.1, 0.0, 0.0])) == 1


def test_base_rows_need_no_adapter():
    assert ProactiveDispatcher().choose(-1, 1.0, make_view([0.5, 0.0, 0.0])) == 1


def test_least_load_ignores_adapters():
    assert LeastLoadDispatcher().choose(0, 1.0, make_view([0.1, 0.0, 0.0])) == 1


def test_fewest_tokens_is_blind_to_what_a_rank_costs():
    view = make_view([9.0, 1.0, 1.0], queue_tokens=[100, 300, 200])
    assert FewestTokensDispatcher().choose(0, 1.0, view) == 0


def test_round_robin_keeps_to_the_placement():
    dispatcher = RoundRobinDispatcher(np.array([[True, False, True]]))
    assert [dispatcher.choose(0, 1.0, make_view([9, 0, 9])) for _ in range(4)] == [0, 2, 0, 2]


def test_routing_gives_each_replica_its_share():
    dispatcher = RoutedDispatcher(np.array([[0.7, 0.3, 0.0]]))
    chosen = [dispatcher.choose(0, 1.0, make_view([0, 0, 0])) for _ in range(100)]
    assert np.bincount(chosen, minlength=3) / 100 == pytest.approx([0.7, 0.3, 0.0], abs=0.01)


def test_routing_shares_requests_whatever_they_take():
    # LoRAServe, section IV: "routed to server_id with probability phi".
    dispatcher, seconds = RoutedDispatcher(np.array([[0.6, 0.4]])), np.tile([1.0, 1.0, 6.0], 50)
    chosen = [dispatcher.choose(0, row_s, make_view([0, 0])) for row_s in seconds.tolist()]
    assert np.bincount(chosen).tolist() == [90, 60]
