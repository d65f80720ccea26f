from __future__ import annotations

import numpy as np
import pytest

from lorabatch.scheduler.batchers.batching import BatchView, MergeWaveBatcher, StepPlan, clustered


def make_view(running, waiting, *, merged=None):
    return BatchView(np.asarray(running, np.int32), np.asarray(waiting, np.int32), 4, merged)


def make_batcher(*, min_rows=None, inner=None, forced=()):
    return MergeWaveBatcher(inner or clustered, lambda adapter: adapter in forced, min_rows)


class MixesFirst:
    """Merges adapter 0 and serves all rows beside it."""

    def __init__(self):
        self.views = []

    def __call__(self, view):
        self.views.append(view)
        all_rows = np.ones(len(view.running_adapter), bool)
        return StepPlan("mixture", 0, all_rows, np.arange(len(view.waiting_adapter))[: 4 - len(all_rows)])


def test_what_must_be_merged_waits_until_all_others_are_done():
    batcher = make_batcher(forced={1})
    assert batcher(make_view([0], [1, 2])).admit.tolist() == [1]
    assert batcher(make_view([0], [1])).mode == "unmerged"
    plan = batcher(make_view([], [1, 1]))
    assert (plan.mode, plan.merged_adapter, plan.admit.tolist()) == ("merged", 1, [0, 1])


def test_a_wave_admits_its_own_rows_only_and_ends_with_them():
    batcher = make_batcher(min_rows=2)
    plan = batcher(make_view([0, 0], [1, 0, 2], merged=0))
    assert (plan.mode, plan.merged_adapter, plan.admit.tolist()) == ("merged", 0, [1])
    assert batcher(make_view([0], [1, 2], merged=0)).merged_adapter == 0
    assert batcher(make_view([], [1, 2], merged=0)).mode == "unmerged"


def test_adapters_with_enough_rows_are_merged_after_the_shared_ones():
    batcher = make_batcher(min_rows=3)
    assert batcher(make_view([], [0, 0, 0, 1])).admit.tolist() == [3]
    assert batcher(make_view([], [0, 0, 0])).merged_adapter == 0


def test_the_inner_batcher_never_sees_what_must_be_merged():
    inner = MixesFirst()
    plan = make_batcher(inner=inner, forced={1})(make_view([0], [1, 2, 1, 0], merged=0))
    assert inner.views[0].waiting_adapter.tolist() == [2, 0]
    assert (plan.mode, plan.merged_adapter, plan.admit.tolist()) == ("mixture", 0, [1, 3])


@pytest.mark.parametrize("running", [[], [1]])
def test_a_forced_wave_is_never_left_to_the_inner_batcher(running):
    inner = MixesFirst()
    plan = make_batcher(inner=inner, forced={1})(make_view(running, [1, 0], merged=1))
    assert (plan.mode, plan.merged_adapter, plan.admit.tolist()) == ("merged", 1, [0])
    assert inner.views == []


def test_the_inner_batcher_does_not_see_a_forced_adapter_that_is_still_merged():
    inner = MixesFirst()
    make_batcher(inner=inner, forced={1})(make_view([], [0], merged=1))
    assert inner.views[0].merged_adapter is None
