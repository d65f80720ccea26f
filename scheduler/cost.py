"""Seconds, predicted: steps, merges, adapter loads. Everything that plans asks this and nothing else.

A step's time is linear in what the step does (`StepLoad`), with coefficients that are never negative. They
come from `fit` on measured steps (least squares, R² reported) or from a preset of `machines.py`. Linear is
enough because a step is the sum of reading the weights, the products per token, reading the KV cache, and
the adapters' share; tests and `docs/simulation.md` say how well it holds.

All loads may be numbers or arrays of one shape; the answer has that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .workload import BASE_MODEL

AdapterSource = Literal["host", "peer", "storage"]
KernelKind = Literal["exact", "padded"]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one forward pass does.

    `prefill_tokens`: prompt tokens computed. `prefill_pairs`: of such a token and one it attends to, itself included
    (`prompt_pairs`). `decode_rows`: rows that get one token. `context_tokens`: KV slots read, over all rows. The rest
    is the unmerged share, zero when merged: `num_adapters` distinct adapters, `rank_sum` their ranks added up (weights
    read), `lora_tokens` the tokens with an adapter (activations gathered and added), `rank_tokens` the sum over these
    of their rank (products).
    """

    prefill_tokens: ArrayLike = 0.0
    decode_rows: ArrayLike = 0.0
    context_tokens: ArrayLike = 0.0
    num_adapters: ArrayLike = 0.0
    rank_sum: ArrayLike = 0.0
    rank_tokens: ArrayLike = 0.0
    prefill_pairs: ArrayLike = 0.0
    lora_tokens: ArrayLike = 0.0


def prompt_pairs(num_tokens: ArrayLike, num_stored: ArrayLike = 0.0) -> NDArray[np.float64]:
    """Pairs that attention computes for `num_tokens` of a prompt behind `num_stored` of it."""
    tokens = np.asarray(num_tokens, dtype=np.float64)
    return np.asarray(tokens * (np.asarray(num_stored, dtype=np.float64) + (tokens + 1) / 2))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one kind of replica; all in seconds per unit of the name, none negative.

    `step_s`: a step that does nothing. `lora_step_s`: added once when any row is unmerged (launches).
    `merge_s`: switch the merged adapter; `first_merge_s` more for a replica's first one, which makes its second copy of
    the weights. `host_bytes_per_s`, `peer_…`, `storage_…`: where an adapter comes
    from, plus `load_s` for each load. `kernel`: `exact` pays each token its own rank, `padded` the largest
    rank present (S-LoRA, Punica; LoRAServe section III-A). `fit_r_squared`: None for a preset.
    """

    step_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float
    lora_step_s: float
    adapter_s: float
    rank_s: float
    rank_token_s: float
    merge_s: float
    load_s: float
    host_bytes_per_s: float
    peer_bytes_per_s: float
    storage_bytes_per_s: float
    kernel: KernelKind = "exact"
    fit_r_squared: float | None = None
    prefill_pair_s: float = 0.0
    lora_token_s: float = 0.0
    first_merge_s: float = 0.0

    def step_seconds(self, load: StepLoad) -> NDArray[np.float64]:
        """Seconds of a step, or of each step of an array of them."""
        adapters = np.asarray(load.num_adapters, dtype=np.float64)
        seconds = (
            self.step_s
            + self.prefill_token_s * np.asarray(load.prefill_tokens, dtype=np.float64)
            + self.decode_row_s * np.asarray(load.decode_rows, dtype=np.float64)
            + self.context_token_s * np.asarray(load.context_tokens, dtype=np.float64)
            + self.lora_step_s * (adapters > 0)
            + self.adapter_s * adapters
            + self.rank_s * np.asarray(load.rank_sum, dtype=np.float64)
            + self.rank_token_s * np.asarray(load.rank_tokens, dtype=np.float64)
            + self.prefill_pair_s * np.asarray(load.prefill_pairs, dtype=np.float64)
            + self.lora_token_s * np.asarray(load.lora_tokens, dtype=np.float64)
        )
        return np.asarray(seconds, dtype=np.float64)

    def load_seconds(self, weight_bytes: float, source: AdapterSource) -> float:
        """Seconds until an adapter of that size is on the device."""
        bytes_per_s = {
            "host": self.host_bytes_per_s,
            "peer": self.peer_bytes_per_s,
            "storage": self.storage_bytes_per_s,
        }
        return self.load_s + weight_bytes / bytes_per_s[source]

    def row_seconds(
        self,
        prompt_tokens: ArrayLike,
        output_tokens: ArrayLike,
        *,
        batch_rows: int,
        rank: ArrayLike = 0.0,
        num_adapters: float = 0.0,
        shared_tokens: ArrayLike = 0.0,
    ) -> NDArray[np.float64]:
        """A row's share of a replica whose batch is full: its prefill, and `1 / batch_rows` of its decode
        steps.

        `rank`: of the row's adapter, 0 when merged or base. `num_adapters`: distinct ones in the batch.
        `shared_tokens`: of the prompt, not computed again.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        output = np.asarray(output_tokens, dtype=np.float64)
        ranks = np.asarray(rank, dtype=np.float64)
        launches = self.lora_step_s if num_adapters > 0 else 0.0
        shared = self.step_s + launches + (self.adapter_s + self.rank_s * ranks) * num_adapters
        adapter_token_s = self.rank_token_s * ranks + self.lora_token_s * (ranks > 0)
        decode = self.decode_row_s + self.context_token_s * (prompt + output / 2) + adapter_token_s
        computed = prompt - np.asarray(shared_tokens, dtype=np.float64)
        prefill = (self.prefill_token_s + adapter_token_s) * computed
        prefill = prefill + self.prefill_pair_s * prompt_pairs(computed, prompt - computed)
        return np.asarray(prefill + output * (shared / batch_rows + decode), dtype=np.float64)

    def operating_point(
        self, rank: int, *, batch_rows: int, prompt_tokens: float = 512.0, output_tokens: float = 128.0
    ) -> float:
        """Tokens per second of one replica serving only adapters of this rank (LoRAServe section IV-A)."""
        seconds = self.row_seconds(prompt_tokens, output_tokens, batch_rows=batch_rows, rank=rank, num_adapters=1)
        return float((prompt_tokens + output_tokens) / seconds)

    def scaled(self, factor: float) -> CostModel:
        """The same replica, `factor` times slower in everything it computes."""
        computed = [f.name for f in fields(self) if f.name.endswith("_s") and "bytes" not in f.name]
        return replace(self, **{name: getattr(self, name) * factor for name in computed})

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every coefficient."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostModel:
        """The model `to_json` wrote. Raises ValueError naming every key that is missing, unknown or
        negative.
        """
        names = {f.name for f in fields(cls)}
        required = {f.name for f in fields(cls) if f.default is MISSING}
        problems = [f"{name}: missing" for name in sorted(required - set(value))]
        problems += [f"{name}: unknown" for name in sorted(set(value) - names)]
        problems += [
            f"{name}={number}: must be a number, at least 0"
            for name, number in sorted(value.items())
            if name in names - {"kernel", "fit_r_squared"} and not (isinstance(number, int | float) and number >= 0)
        ]
        if problems:
            raise ValueError(f"cost model: {'; '.join(problems)}. Run `lorabatch profile` again.")
        return cls(**value)


def lora_load(
    row_adapter: NDArray[np.int32],
    row_tokens: ArrayLike,
    ranks: NDArray[np.float64],
    *,
    merged_adapter: int | None = None,
    kernel: KernelKind = "exact",
) -> StepLoad:
    """The unmerged share of a step over rows `[num_rows]`; `ranks` `[num_adapters]`.

    Mixture: while one adapter is merged, its own rows cost nothing and every other row also subtracts it.
    """
    tokens = np.broadcast_to(np.asarray(row_tokens, dtype=np.float64), row_adapter.shape)
    is_other = row_adapter != (BASE_MODEL if merged_adapter is None else merged_adapter)
    adapters = np.unique(row_adapter[is_other & (row_adapter != BASE_MODEL)])
    rank_of_row = np.where(row_adapter >= 0, ranks[row_adapter] if len(ranks) else 0.0, 0.0)
    rank_sum = float(ranks[adapters].sum()) if len(adapters) else 0.0
    num_adapters = len(adapters)
    subtracted = 0.0
    if merged_adapter is not None and is_other.any():
        subtracted = float(ranks[merged_adapter])
        num_adapters += 1
        rank_sum += subtracted
    if kernel == "padded" and is_other.any():
        rank_of_row = np.full(len(row_adapter), rank_of_row[is_other].max())
    rank_tokens = float((tokens * (rank_of_row + subtracted))[is_other].sum())
    has_adapter = is_other & (row_adapter != BASE_MODEL)
    lora_tokens = float(tokens[has_adapter].sum()) + (float(tokens[is_other].sum()) if subtracted else 0.0)
    return StepLoad(num_adapters=num_adapters, rank_sum=rank_sum, rank_tokens=rank_tokens, lora_tokens=lora_tokens)
