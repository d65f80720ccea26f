from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.dispatch import (
    ClusterView,
    FewestTokensDispatcher,
    LeastLoadDispatcher,
    ProactiveDispatcher,
    RoundRobinDispatcher,
    RoutedDispatcher,
)
from lorabatch.scheduler.loraserve import Routing


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
    dispatcher = RoutedDispatcher(Routing(np.array([[0.7, 0.3, 0.0]])))
    chosen = [dispatcher.choose(0, 1.0, make_view([0, 0, 0])) for _ in range(100)]
    assert np.bincount(chosen, minlength=3) / 100 == pytest.approx([0.7, 0.3, 0.0], abs=0.01)


def test_routing_shares_work_and_not_rows():
    dispatcher, seconds = RoutedDispatcher(Routing(np.array([[0.6, 0.4]]))), np.tile([1.0, 1.0, 6.0], 50)
    chosen = [dispatcher.choose(0, row_s, make_view([0, 0])) for row_s in seconds.tolist()]
    work = np.bincount(chosen, weights=seconds, minlength=2)
    assert work / work.sum() == pytest.approx([0.6, 0.4], abs=0.02)
    assert np.bincount(chosen)[0] / len(chosen) != pytest.approx(0.6, abs=0.05)
