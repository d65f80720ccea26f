from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.scheduler.assignment import cheapest_assignment


def test_no_rows_need_no_columns():
    assert len(cheapest_assignment(np.zeros((0, 0)))) == 0


def test_a_known_instance():
    cost = np.array([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])
    assert cheapest_assignment(cost).tolist() == [1, 0, 2]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_it_is_as_cheap_as_the_cheapest_of_all_permutations(n, seed):
    cost = np.random.default_rng(seed).integers(-9, 9, (n, n)).astype(float)
    columns = cheapest_assignment(cost)
    assert sorted(columns) == list(range(n))
    best = min(sum(cost[i, p[i]] for i in range(n)) for p in permutations(range(n)))
    assert cost[np.arange(n), columns].sum() == best
