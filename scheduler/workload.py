"""All rows of a job as numbers: the planner's and the simulator's only view of the data.

Shapes: every per-row array is `[num_rows]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Code of the base model in arrays of adapter numbers; elsewhere the base model is None.
BASE_MODEL = -1


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One adapter as the planner sees it. Adapters of the same content are one, whatever their names."""

    #: Id of the adapter: the hash of its content or, in a simulation, any other unique string.
    adapter_id: str
    #: Largest LoRA rank over its modules.
    rank: int
    #: Bytes that it takes on a device.
    weight_bytes: int
    #: Whether workers fetch it from a store.
    is_fetched: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Rows of a job, one array per fact; every array is `[num_rows]`."""

    #: Adapters of the job; `adapter_index` counts in this order.
    adapters: tuple[AdapterInfo, ...]
    #: Number of each row's adapter, an index into `adapters`; `BASE_MODEL` (-1) for the base model.
    adapter_index: NDArray[np.int32]
    #: Tokens of each prompt.
    prompt_tokens: NDArray[np.int32]
    #: Most tokens that each row may generate; 0 marks a row that needs no engine (an error row).
    max_tokens: NDArray[np.int32]
    #: Equal for rows whose prompts begin alike; 0 when unknown.
    prefix_hash: NDArray[np.uint64]
    #: True output lengths, which only a simulation knows (None: unknown).
    output_tokens: NDArray[np.int32] | None = None
    #: Tokens at the beginning of each prompt that another row has computed and a prefix cache copies (None: no tokens).
    shared_tokens: NDArray[np.int32] | None = None
    #: Whether each row's tokens are drawn at a temperature (None: no row's are).
    is_drawn: NDArray[np.bool_] | None = None
    #: Whether log-probabilities of each row's prompt are asked (None: no row's are).
    is_scored: NDArray[np.bool_] | None = None
    #: Tokens of each answer that are known before it is generated, 0 where they are not (None: known of no row).
    fixed_tokens: NDArray[np.int32] | None = None
    #: Equal for rows whose answers are expected to have like lengths, if they have the same adapter (None: all rows).
    task: NDArray[np.uint64] | None = None
    #: Rises in the order in which the input has the rows (None: the arrays are in that order).
    input_place: NDArray[np.int64] | None = None
    #: Equal for rows that one shard must have, which stand side by side (None: each row is by itself).
    groups: NDArray[np.int64] | None = None

    @property
    def input_order(self) -> NDArray[np.int64]:
        """Row numbers in the order of the input, int64 `[num_rows]`."""
        return np.argsort(self.places, kind="stable")

    @property
    def places(self) -> NDArray[np.int64]:
        """Place of each row in the order of the input, int64 `[num_rows]`; see `input_place`."""
        return np.arange(self.num_rows) if self.input_place is None else self.input_place

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return len(self.adapter_index)

    @property
    def computed_prompt_tokens(self) -> NDArray[np.int32]:
        """Prompt tokens of each row that must be computed, int32 `[num_rows]`."""
        return self.prompt_tokens if self.shared_tokens is None else self.prompt_tokens - self.shared_tokens

    def computed_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Prompt tokens of these rows that must be computed, int32 `[len(rows)]`; makes no array of all rows."""
        prompt = self.prompt_tokens[rows]
        return prompt if self.shared_tokens is None else prompt - self.shared_tokens[rows]

    def rows_per_adapter(self) -> NDArray[np.int64]:
        """`[num_adapters + 1]`: rows of each adapter; the last entry counts the base model's rows."""
        return np.bincount(self.adapter_index % (len(self.adapters) + 1), minlength=len(self.adapters) + 1).astype(
            np.int64
        )

    def part(self, rows: NDArray[np.int64]) -> Workload:
        """The workload of some rows, in this order."""
        columns: dict[str, Any] = {name: array[rows] for name, array, _ in self._arrays()}
        return replace(self, **columns)

    @classmethod
    def joined(cls, parts: Sequence[Workload]) -> Workload:
        """The workload of the rows of all parts, part after part. All parts have the same adapters."""
        names = [name for name, _, _ in parts[0]._arrays()]
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **columns)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the array and the first bad row, when the numbers contradict each other."""
        for name, array, dtype in self._arrays():
            assert array.dtype == dtype, f"{name}: dtype {array.dtype}, expected {np.dtype(dtype)}"
            assert array.shape == (self.num_rows,), f"{name}: shape {array.shape}, expected ({self.num_rows},)"
        adapter_ids = [adapter.adapter_id for adapter in self.adapters]
        assert len(set(adapter_ids)) == len(adapter_ids), "adapters: ids must be unique"
        _assert_rows("adapter_index", self.adapter_index, self.adapter_index >= BASE_MODEL)
        _assert_rows("adapter_index", self.adapter_index, self.adapter_index < len(self.adapters))
        _assert_rows("prompt_tokens", self.prompt_tokens, self.prompt_tokens >= 0)
        _assert_rows("max_tokens", self.max_tokens, self.max_tokens >= 0)
        if self.shared_tokens is not None:
            fits = (self.shared_tokens >= 0) & (self.shared_tokens <= self.prompt_tokens)
            _assert_rows("shared_tokens", self.shared_tokens, fits)
        if self.fixed_tokens is not None:
            fits = (self.fixed_tokens >= 0) & (self.fixed_tokens <= self.max_tokens)
            _assert_rows("fixed_tokens", self.fixed_tokens, fits)
        if self.output_tokens is not None:
            within = (self.output_tokens >= 0) & (self.output_tokens <= self.max_tokens)
            _assert_rows("output_tokens", self.output_tokens, within)

    def _arrays(self) -> list[tuple[str, NDArray[Any], type[np.generic]]]:
        arrays: list[tuple[str, NDArray[Any] | None, type[np.generic]]] = [
            ("adapter_index", self.adapter_index, np.int32),
            ("prompt_tokens", self.prompt_tokens, np.int32),
            ("max_tokens", self.max_tokens, np.int32),
            ("prefix_hash", self.prefix_hash, np.uint64),
            ("output_tokens", self.output_tokens, np.int32),
            ("shared_tokens", self.shared_tokens, np.int32),
            ("is_drawn", self.is_drawn, np.bool_),
            ("is_scored", self.is_scored, np.bool_),
            ("fixed_tokens", self.fixed_tokens, np.int32),
            ("task", self.task, np.uint64),
            ("input_place", self.input_place, np.int64),
            ("groups", self.groups, np.int64),
        ]
        return [(name, array, dtype) for name, array, dtype in arrays if array is not None]


def _assert_rows(name: str, array: NDArray[Any], holds: NDArray[np.bool_]) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        raise AssertionError(f"{name}: row {row} has {array[row]}, out of range")
