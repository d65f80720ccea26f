"""When everything happened, one array per fact, rows `[num_rows]` in input order; NaN until it has happened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class Timeline:
    """`admit_s`: joined a batch; `first_token_s`; `finish_s`: float64 seconds since the start. `replica`: int32, the
    last one it ran on. `paused_steps` int64: steps in which it held memory and sat out. `busy_s`, `switch_s`, `load_s`
    float64 `[num_replicas]`: time in steps (all included), of which changing the merged adapter, and loading adapters.
    `num_steps` int64, `row_steps` int64, `merged_steps` int64 `[num_replicas]`. `peak_adapters` int64
    `[num_replicas]`: most adapters resident at once.
    """

    admit_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    replica: NDArray[np.int32]
    paused_steps: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    switch_s: NDArray[np.float64]
    load_s: NDArray[np.float64]
    num_steps: NDArray[np.int64]
    row_steps: NDArray[np.int64]
    merged_steps: NDArray[np.int64]
    peak_adapters: NDArray[np.int64]

    @classmethod
    def empty(cls, num_rows: int, num_replicas: int) -> Timeline:
        """Nothing has happened yet."""
        return cls(
            admit_s=np.full(num_rows, np.nan),
            first_token_s=np.full(num_rows, np.nan),
            finish_s=np.full(num_rows, np.nan),
            replica=np.full(num_rows, -1, np.int32),
            paused_steps=np.zeros(num_rows, np.int64),
            busy_s=np.zeros(num_replicas),
            switch_s=np.zeros(num_replicas),
            load_s=np.zeros(num_replicas),
            num_steps=np.zeros(num_replicas, np.int64),
            row_steps=np.zeros(num_replicas, np.int64),
            merged_steps=np.zeros(num_replicas, np.int64),
            peak_adapters=np.zeros(num_replicas, np.int64),
        )

    def forget(self, rows: NDArray[np.int64]) -> None:
        """What these rows had done is lost; they start again."""
        for array in (self.admit_s, self.first_token_s, self.finish_s):
            array[rows] = np.nan
        self.replica[rows] = -1
        self.paused_steps[rows] = 0
