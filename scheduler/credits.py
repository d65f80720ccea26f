"""Credits against starvation: dLoRA Algorithm 3 (appendix A.1).

Every adapter starts with the same credit. Whoever is served out of turn pays those who were passed over, row
by row. An adapter that was passed over for long grows rich; above `starve_above` its rows are served first
until it has fallen below `normal_below`. The sum of all credits never changes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Credits:
    """One account per adapter; rows of the base model have the last.

    `initial`: rows an adapter may serve out of turn before it must have waited. `starve_above` and
    `normal_below` are T_starve and T_normal of the paper; their distance damps oscillation.
    """

    def __init__(self, num_adapters: int, *, initial: float, starve_above: float, normal_below: float) -> None:
        assert normal_below <= starve_above, f"T_normal={normal_below} above T_starve={starve_above}"
        assert initial <= starve_above, f"initial={initial}: everybody would start starving"
        self.balance: NDArray[np.float64] = np.full(num_adapters + 1, float(initial))
        self._is_starving = np.zeros(num_adapters + 1, dtype=bool)
        self._initial = float(initial)
        self._starve_above = starve_above
        self._normal_below = normal_below

    def extend(self, num_adapters: int) -> None:
        """Open accounts for adapters that became known since; the base model's stays the last."""
        num_new = num_adapters + 1 - len(self.balance)
        if num_new > 0:
            self.balance = np.insert(self.balance, -1, np.full(num_new, self._initial))
            self._is_starving = np.insert(self._is_starving, -1, np.zeros(num_new, dtype=bool))

    def starving(self) -> NDArray[np.bool_]:
        """`[num_adapters + 1]`: who must be served first; updates the two states (lines 6-11)."""
        has_recovered = self._is_starving & (self.balance < self._normal_below)
        is_poorly_served = ~self._is_starving & (self.balance > self._starve_above)
        self._is_starving = (self._is_starving & ~has_recovered) | is_poorly_served
        return self._is_starving

    def transfer(self, served: NDArray[np.int64], fcfs: NDArray[np.int64], types: NDArray[np.int32]) -> None:
        """Rows of `served` that jumped the queue pay the rows of `fcfs` that were passed over (lines 14,
        20).

        `served`, `fcfs`: row positions; `types` `[num_rows]`: adapter of each. When the served rows were all
        in turn and only fewer than could be, all of them share the bill.
        """
        passed = types[np.setdiff1d(fcfs, served)]
        jumped = types[np.setdiff1d(served, fcfs)]
        payers = jumped if len(jumped) else types[served]
        if len(passed) == 0 or len(payers) == 0:
            return
        np.add.at(self.balance, payers, -len(passed) / len(payers))
        np.add.at(self.balance, passed, 1.0)

    def eligible(self, fcfs: NDArray[np.int64], types: NDArray[np.int32]) -> NDArray[np.bool_]:
        """`[num_adapters + 1]`: who could pay for being served alone instead of `fcfs` (line 17)."""
        in_turn = np.bincount(types[fcfs] % len(self.balance), minlength=len(self.balance))
        price = len(fcfs) - in_turn
        return np.asarray(self.balance >= price)

    def check_integrity(self, expected_sum: float) -> None:
        """Raise AssertionError when credit was made or lost."""
        total = float(self.balance.sum())
        assert abs(total - expected_sum) <= 1e-6 * max(1.0, abs(expected_sum)), f"{total} != {expected_sum}"
