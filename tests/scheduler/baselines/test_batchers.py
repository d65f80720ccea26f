from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.baselines.batchers import MergedBatcher, one_at_a_time, unmerged
from lorabatch.scheduler.batchers.batching import BatchView


def make_view(running, waiting, *, batch=4, merged=None):
    return BatchView(np.asarray(running, np.int32), np.asarray(waiting, np.int32), batch, merged)


def run_to_end(batcher, arrivals, *, batch, steps_each=1):
    """Adapters served in each step, every row needing `steps_each` steps."""
    waiting, running, history, merged = list(arrivals), [], [], None
    while waiting or running:
        view = make_view([a for a, _ in running], waiting, batch=batch, merged=merged)
        plan = batcher(view)
        plan.check_integrity(view)
        merged = plan.merged_adapter
        served = [i for i in range(len(running)) if plan.serve[i]]
        admitted = plan.admit.tolist()
        history.append(sorted([running[i][0] for i in served] + [waiting[i] for i in admitted]))
        assert history[-1], "an idle step"
        running = [(a, left - (i in served)) for i, (a, left) in enumerate(running)]
        running += [(waiting[i], steps_each - 1) for i in admitted]
        waiting = [a for i, a in enumerate(waiting) if i not in admitted]
        running = [(a, left) for a, left in running if left > 0]
    return history


def test_the_papers_figure_2a_one_adapter_at_a_time_needs_two_batches():
    assert run_to_end(one_at_a_time, [0, 1, 1], batch=3) == [[0], [1, 1]]
    assert run_to_end(unmerged, [0, 1, 1], batch=3) == [[0, 1, 1]]


def test_unmerged_is_first_come_first_served():
    assert unmerged(make_view([5], [3, 1, 2, 1])).admit.tolist() == [0, 1, 2]


def test_fcfs_passes_over_an_adapter_too_many():
    assert unmerged(make_view([5], [3, 1, -1, 3]), max_resident=2).admit.tolist() == [0, 2, 3]


def test_merged_only_serves_one_adapter_and_then_the_oldest_waiting():
    assert run_to_end(MergedBatcher(), [0, 1, 0, 2, 1], batch=4) == [[0, 0], [1, 1], [2]]


def test_merged_only_gives_others_a_turn_after_its_patience():
    batcher = MergedBatcher(patience=3)
    merged = []
    for _ in range(5):
        merged.append(batcher(make_view([], [0] * 9 + [1], merged=merged[-1] if merged else None)))
        merged[-1] = merged[-1].merged_adapter
    assert merged == [0, 0, 0, 1, 1]


def test_a_closed_batch_admits_no_row_until_it_is_done():
    plan = one_at_a_time(make_view([0], [0, 0]))
    assert len(plan.admit) == 0


def test_base_rows_are_merged_with_nothing():
    plan = MergedBatcher()(make_view([], [-1, -1, 0]))
    assert (plan.mode, plan.admit.tolist()) == ("unmerged", [0, 1])


@pytest.mark.parametrize(
    "make", [lambda: unmerged, lambda: partial(unmerged, max_resident=1), MergedBatcher, lambda: one_at_a_time]
)
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-1, 3), max_size=30), st.integers(1, 6), st.integers(1, 3))
def test_every_row_is_served_in_the_end(make, arrivals, batch, steps_each):
    history = run_to_end(make(), arrivals, batch=batch, steps_each=steps_each)
    assert sum(len(step) for step in history) == len(arrivals) * steps_each
