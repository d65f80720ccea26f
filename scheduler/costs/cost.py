"""Predicts seconds of steps, merges and adapter loads; every plan asks this interface and no other.

A step's time is linear in what the step does (`StepLoad`), with coefficients that are never negative. Linear is enough
because a step is the sum of reading the weights, the products per token, reading the KV cache, and the adapters' share;
tests and `benchmarks/README.md` say how well it holds. The coefficients come from the steps that `lorabatch profile`
measures (`fitting.fit`: least squares, R² reported), or from a preset in `machines.MACHINES`.

All loads may be numbers or arrays of one shape; the result has that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..workload import BASE_MODEL

AdapterSource = Literal["host", "peer", "storage"]
KernelKind = Literal["exact", "padded"]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of one forward pass, or of several passes in arrays.

    The fields from `num_adapters` to `rank_tokens` and `lora_tokens` are the unmerged share: they are zero when all
    rows run merged or on the base model.
    """

    #: Prompt tokens computed.
    prefill_tokens: ArrayLike = 0.0
    #: Rows that get one token.
    decode_rows: ArrayLike = 0.0
    #: KV slots read, over all rows.
    context_tokens: ArrayLike = 0.0
    #: Distinct unmerged adapters.
    num_adapters: ArrayLike = 0.0
    #: LoRA ranks of the distinct unmerged adapters, added up (weights read).
    rank_sum: ArrayLike = 0.0
    #: LoRA ranks of all tokens with an unmerged adapter, added up (products); kernel `padded` counts each token at the
    #: largest rank.
    rank_tokens: ArrayLike = 0.0
    #: Pairs of a computed prompt token and a token it attends to, itself included (`prompt_pairs`).
    prefill_pairs: ArrayLike = 0.0
    #: Tokens with an unmerged adapter (activations gathered and added).
    lora_tokens: ArrayLike = 0.0
    #: Tokens that are drawn rather than the likeliest.
    drawn_tokens: ArrayLike = 0.0
    #: Prompt tokens whose log-probabilities are asked.
    scored_tokens: ArrayLike = 0.0


def prompt_pairs(num_tokens: ArrayLike, num_stored: ArrayLike = 0.0) -> NDArray[np.float64]:
    """Pairs that attention computes for `num_tokens` of a prompt behind `num_stored` of it."""
    tokens = np.asarray(num_tokens, dtype=np.float64)
    return np.asarray(tokens * (np.asarray(num_stored, dtype=np.float64) + (tokens + 1) / 2))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of one kind of replica, none negative.

    A coefficient in seconds is what one unit of its field in `StepLoad` costs, unless its comment says otherwise.
    """

    #: Seconds of a step that does nothing.
    step_s: float
    #: Seconds per prompt token computed.
    prefill_token_s: float
    #: Seconds per row that gets one token.
    decode_row_s: float
    #: Seconds per KV slot read.
    context_token_s: float
    #: Seconds added once to a step in which any row is unmerged (launches).
    lora_step_s: float
    #: Seconds per distinct unmerged adapter of a step.
    adapter_s: float
    #: Seconds per unit of `rank_sum`.
    rank_s: float
    #: Seconds per unit of `rank_tokens`.
    rank_token_s: float
    #: Seconds to switch the merged adapter.
    merge_s: float
    #: Seconds of each adapter load, beside those for its bytes.
    load_s: float
    #: Bytes per second of adapters that come from host memory.
    host_bytes_per_s: float
    #: Bytes per second of adapters that come from another replica.
    peer_bytes_per_s: float
    #: Bytes per second of adapters that come from storage.
    storage_bytes_per_s: float
    #: `exact` charges each token its own rank, `padded` the largest rank present (S-LoRA, Punica; LoRAServe section
    #: III-A).
    kernel: KernelKind = "exact"
    #: R squared of `fit` (None: the coefficients are from elsewhere).
    fit_r_squared: float | None = None
    #: Seconds per unit of `prefill_pairs`.
    prefill_pair_s: float = 0.0
    #: Seconds per token with an unmerged adapter.
    lora_token_s: float = 0.0
    #: Seconds added to a replica's first switch, which makes its second copy of the weights.
    first_merge_s: float = 0.0
    #: Seconds added once when prompts and decoding rows share a step; 0 where an engine computes both in one pass.
    mixed_step_s: float = 0.0
    #: Seconds that a token drawn at a temperature costs more than the likeliest one.
    draw_s: float = 0.0

    def step_seconds(self, load: StepLoad) -> NDArray[np.float64]:
        """Seconds of a step, or of each step of an array of them."""
        # Numbers and arrays alike: converting each would take longer than the sum.
        given: Any = load
        seconds = (
            self.step_s
            + self.prefill_token_s * given.prefill_tokens
            + self.decode_row_s * given.decode_rows
            + self.context_token_s * given.context_tokens
            + self.lora_step_s * (given.num_adapters > 0)
            + self.adapter_s * given.num_adapters
            + self.rank_s * given.rank_sum
            + self.rank_token_s * given.rank_tokens
            + self.prefill_pair_s * given.prefill_pairs
            + self.lora_token_s * given.lora_tokens
            + self.mixed_step_s * ((given.prefill_tokens > 0) & (given.decode_rows > 0))
            + self.draw_s * given.drawn_tokens
            + self.scored_token_s * given.scored_tokens
        )
        return np.asarray(seconds, dtype=np.float64)

    @property
    def scored_token_s(self) -> float:
        """Extra seconds of a prompt token whose log-probability is asked: it needs logits, as a decoding row does."""
        return max(0.0, self.decode_row_s - self.prefill_token_s)

    def load_seconds(self, weight_bytes: float, source: AdapterSource) -> float:
        """Seconds until an adapter of `weight_bytes` is on the device."""
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
        is_drawn: ArrayLike = False,
        is_scored: ArrayLike = False,
    ) -> NDArray[np.float64]:
        """A row's share of a replica whose batch is full: its prefill, and `1 / batch_rows` of its decode steps.

        `rank`: LoRA rank of the row's adapter, 0 when merged or base. `num_adapters`: distinct ones in the batch.
        `shared_tokens`: tokens of the prompt that are not computed again. `is_drawn`: whether its tokens are drawn.
        `is_scored`: whether its prompt's log-probabilities are asked.
        """
        prompt = np.asarray(prompt_tokens, dtype=np.float64)
        output = np.asarray(output_tokens, dtype=np.float64)
        ranks = np.asarray(rank, dtype=np.float64)
        launches = self.lora_step_s if num_adapters > 0 else 0.0
        shared = self.step_s + launches + (self.adapter_s + self.rank_s * ranks) * num_adapters
        adapter_token_s = self.rank_token_s * ranks + self.lora_token_s * (ranks > 0)
        decode = self.decode_row_s + self.context_token_s * (prompt + output / 2) + adapter_token_s
        decode = decode + self.draw_s * np.asarray(is_drawn, dtype=np.float64)
        computed = prompt - np.asarray(shared_tokens, dtype=np.float64)
        scored_token_s = self.scored_token_s * np.asarray(is_scored, dtype=np.float64)
        prefill = (self.prefill_token_s + adapter_token_s + scored_token_s) * computed
        prefill = prefill + self.prefill_pair_s * prompt_pairs(computed, prompt - computed)
        return np.asarray(prefill + output * (shared / batch_rows + decode), dtype=np.float64)

    def operating_point(
        self, rank: int, *, batch_rows: int, prompt_tokens: float = 512.0, output_tokens: float = 128.0
    ) -> float:
        """Tokens per second of one replica serving only adapters of this rank (LoRAServe section IV-A)."""
        seconds = self.row_seconds(prompt_tokens, output_tokens, batch_rows=batch_rows, rank=rank, num_adapters=1)
        return float((prompt_tokens + output_tokens) / seconds)

    def scaled(self, factor: float) -> CostModel:
        """The model of a replica that is `factor` times as slow: all seconds scaled, bytes per second kept."""
        computed = [f.name for f in fields(self) if f.name.endswith("_s") and "bytes" not in f.name]
        return replace(self, **{name: getattr(self, name) * factor for name in computed})

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every coefficient."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CostModel:
        """The model `to_json` wrote. Raises ValueError naming every key that is missing, unknown or negative."""
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


#: Coefficients of `CostModel` that price steps.
STEP_COEFFICIENTS = (
    "step_s",
    "prefill_token_s",
    "decode_row_s",
    "context_token_s",
    "lora_step_s",
    "adapter_s",
    "rank_s",
    "rank_token_s",
    "prefill_pair_s",
    "lora_token_s",
    "mixed_step_s",
    "draw_s",
)


def lora_load(
    row_adapter: NDArray[np.int32],
    row_tokens: ArrayLike,
    ranks: NDArray[np.float64],
    *,
    merged_adapter: int | None = None,
    kernel: KernelKind = "exact",
    **others: ArrayLike,
) -> StepLoad:
    """The unmerged share of a step over rows `[num_rows]`; `ranks` `[num_adapters]`. `others`: the step's other loads.

    Mixture: while one adapter is merged, its own rows cost nothing and every other row also subtracts it.
    """
    present, tokens = _tokens_by_adapter(row_adapter, row_tokens)
    is_other = present != (BASE_MODEL if merged_adapter is None else merged_adapter)
    present, tokens = present[is_other], tokens[is_other]
    has_adapter = present != BASE_MODEL
    adapters = present[has_adapter]
    rank_of = ranks[adapters] if len(adapters) else np.zeros(0)
    num_adapters, rank_sum, num_tokens = len(adapters), float(rank_of.sum()), float(tokens.sum())
    lora_tokens = float(tokens[has_adapter].sum())
    rank_tokens = num_tokens * float(rank_of.max(initial=0.0))
    if kernel == "exact":
        rank_tokens = float((tokens[has_adapter] * rank_of).sum())
    if merged_adapter is not None and len(present):
        subtracted = float(ranks[merged_adapter])
        num_adapters, rank_sum = num_adapters + 1, rank_sum + subtracted
        rank_tokens, lora_tokens = rank_tokens + num_tokens * subtracted, lora_tokens + num_tokens
    return StepLoad(
        num_adapters=num_adapters, rank_sum=rank_sum, rank_tokens=rank_tokens, lora_tokens=lora_tokens, **others
    )


# Largest adapter number for which a table of all adapters is faster than sorting those of the rows.
_TABLE_SIZE = 4096


def _tokens_by_adapter(
    row_adapter: NDArray[np.int32], row_tokens: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Adapters of these rows, rising, and the tokens of each."""
    tokens = np.asarray(row_tokens, dtype=np.float64)
    if tokens.ndim == 0:
        tokens = np.full(len(row_adapter), float(tokens))
    if len(row_adapter) and row_adapter.max() >= _TABLE_SIZE:
        adapters, group = np.unique(row_adapter, return_inverse=True)
        sums: NDArray[np.float64] = np.bincount(group, weights=tokens).astype(np.float64)
        return adapters.astype(np.int64), sums
    # The base model is -1.
    slots = row_adapter.astype(np.int64) + 1
    present: NDArray[np.int64] = np.flatnonzero(np.bincount(slots))
    sums = np.bincount(slots, weights=tokens)[present].astype(np.float64)
    return present - 1, sums
