"""The cheapest one-to-one assignment (Hungarian method with shortest augmenting paths)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cheapest_assignment(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column of each row, so that no column is taken twice and the sum of costs is least.

    `cost` `[n, n]`, finite. Cubic in `n`; the inner loop over columns is vectorised. Deterministic under
    ties.
    """
    n = len(cost)
    assert cost.shape == (n, n), f"cost is {cost.shape}, expected a square"
    row_price = np.zeros(n + 1)
    column_price = np.zeros(n + 1)
    # Column n is a sentinel that holds the row being placed; row n means that a column is free.
    row_of = np.full(n + 1, n, dtype=np.int64)
    for row in range(n):
        row_of[n] = row
        came_from = _grow_path(cost, row_of, row_price, column_price)
        column = int(came_from[n + 1])
        while column != n:
            before = int(came_from[column])
            row_of[column] = row_of[before]
            column = before
    column_of = np.empty(n, dtype=np.int64)
    column_of[row_of[:n]] = np.arange(n)
    return column_of


def _grow_path(
    cost: NDArray[np.float64],
    row_of: NDArray[np.int64],
    row_price: NDArray[np.float64],
    column_price: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Shortest path from the sentinel to a free column; prices are adjusted on the way.

    Returns `[n + 2]`: the column before each column on its path; the last entry is the free column found.
    """
    n = len(cost)
    distance = np.full(n, np.inf)
    came_from = np.full(n + 2, n, dtype=np.int64)
    is_done = np.zeros(n + 1, dtype=bool)
    column = n
    while row_of[column] != n or column == n:
        is_done[column] = True
        row = row_of[column]
        reduced = cost[row] - row_price[row] - column_price[:n]
        is_shorter = ~is_done[:n] & (reduced < distance)
        distance[is_shorter] = reduced[is_shorter]
        came_from[:n][is_shorter] = column
        column = int(np.argmin(np.where(is_done[:n], np.inf, distance)))
        delta = distance[column]
        row_price[row_of[is_done]] += delta
        column_price[is_done] -= delta
        distance[~is_done[:n]] -= delta
    came_from[n + 1] = column
    return came_from
